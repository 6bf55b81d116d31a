"""Tests of `hostir`: one folder per room, one or more files per module."""
