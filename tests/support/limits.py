"""How long tests wait for what comes at once unless it never comes.

No result depends on it: a machine may be slow, and busy with other work.
"""

# Below the limit of a test (`timeout` in pyproject.toml), so that what hangs is ended and named.
HANG_S = 240.0
