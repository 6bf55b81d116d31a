"""Tests of `fuser/frontend`."""
