"""Fuzzers: random programs against torch in float64. `scripts/fuzz.py` is the entrance."""
