"""Tests of `hostir/tools`."""
