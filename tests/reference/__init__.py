"""An interpreter of host programs that is independent of the runtime, for comparison in tests."""
