"""Tests of `multidevice`: one folder per subpackage, one or more files per module."""
