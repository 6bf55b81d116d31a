"""The host program: its ops, the one lowering, passes, verification and execution."""
