"""Kinds of ops, a file each: how random programs draw them, and their meaning in float64."""
