"""Passes over host programs: one function per file, container -> container."""
