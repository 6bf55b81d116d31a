"""How long tests wait before they conclude that something hangs.

The limits are generous, because a machine may be slow and busy. No result depends on them.
"""

# Below the limit of a test (`timeout` in pyproject.toml), so that what hangs is ended and named.
HANG_S = 240.0
