"""Tests of `multidevice/sharding`."""
