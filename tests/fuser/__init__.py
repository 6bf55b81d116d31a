"""Tests of `fuser`: one folder per subpackage, one or more files per module."""
