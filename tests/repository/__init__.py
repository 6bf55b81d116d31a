"""Tests of the repository itself: pages, packages, imports, and the tests' own fixtures."""
