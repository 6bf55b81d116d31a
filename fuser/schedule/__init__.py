"""Scheduling primitives and the automatic schedulers that use them."""
