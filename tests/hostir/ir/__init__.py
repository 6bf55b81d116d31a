"""Tests of `hostir/ir`."""
