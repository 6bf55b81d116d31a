"""What a user's program touches first: FusionDefinition, caches and entry points."""
