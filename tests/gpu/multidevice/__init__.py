"""Tests of `multidevice` on a GPU."""
