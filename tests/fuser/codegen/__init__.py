"""Tests of `fuser/codegen`."""
