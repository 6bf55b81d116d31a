"""Tests of `fuser/kernels`."""
