"""Tests of `hostir/passes`."""
