"""Tests of `scripts/` and `benchmarks/`; each file is named after the script."""
