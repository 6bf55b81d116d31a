"""Passes over a fusion before it is cut into segments."""
