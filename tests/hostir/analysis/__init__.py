"""Tests of `hostir/analysis`."""
