"""Shared helpers of the tests: programs with their torch meaning, stand-ins for hardware,
jobs.
"""
