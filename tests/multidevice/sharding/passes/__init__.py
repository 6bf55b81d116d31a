"""Tests of `multidevice/sharding/passes`."""
