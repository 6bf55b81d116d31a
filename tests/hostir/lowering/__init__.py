"""Tests of `hostir/lowering`."""
