"""Tests that need a CUDA device, by package; everything in this folder has the mark `gpu`."""
