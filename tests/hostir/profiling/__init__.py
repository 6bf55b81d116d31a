"""Tests of `hostir/profiling`."""
