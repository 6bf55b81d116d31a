"""Passes over a host program, each with a before and an after."""
