"""Tests of `scripts/` and `benchmarks/`, named after the script."""
