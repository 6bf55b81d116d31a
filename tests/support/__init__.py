"""Shared helpers: programs with their torch meaning, stand-ins for hardware, runs on ranks."""
