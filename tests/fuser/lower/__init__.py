"""Tests of `fuser/lower`."""
