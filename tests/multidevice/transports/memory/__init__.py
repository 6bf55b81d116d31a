"""Tests of `multidevice/transports/memory`."""
