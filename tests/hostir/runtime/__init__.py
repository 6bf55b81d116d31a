"""Tests of `hostir/runtime`."""
