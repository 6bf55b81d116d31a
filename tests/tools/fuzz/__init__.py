"""Tests of `tools/fuzz`: the oracle holds for torch, and planted faults are found."""
