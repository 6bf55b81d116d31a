"""Tests of `tools/fuzz`: its oracle agrees with torch, and its fuzzers find planted faults."""
