"""Tests of `multidevice/transports`."""
