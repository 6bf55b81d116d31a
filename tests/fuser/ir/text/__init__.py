"""Tests of `fuser/ir/text`."""
