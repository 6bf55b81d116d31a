"""Tests of `hostir` on a GPU."""
