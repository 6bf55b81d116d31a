"""Tests of `multidevice/transports/base`."""
