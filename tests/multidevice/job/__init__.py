"""Tests of `multidevice/job`."""
