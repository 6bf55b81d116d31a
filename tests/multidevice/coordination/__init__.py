"""Tests of `multidevice/coordination`."""
