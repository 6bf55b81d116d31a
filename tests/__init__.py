"""Tests, one folder per layer; `tests/gpu` needs a CUDA device."""
