"""Tests of `multidevice`: one folder per room, one or more files per module."""
