"""Tests that need a CUDA device, by package; all tests in this folder have the mark `gpu`."""
