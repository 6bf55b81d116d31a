"""Tests of `hostir`: one folder per subpackage, one or more files per module."""
