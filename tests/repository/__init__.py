"""Tests of the repository itself: documents, packages, imports, and the fixtures of the
tests.
"""
