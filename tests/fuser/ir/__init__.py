"""Tests of `fuser/ir`."""
