"""Tests of `fuser`: one folder per room, one or more files per module."""
