"""Tests of `hostir/cost`."""
