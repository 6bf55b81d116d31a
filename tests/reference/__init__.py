"""A second opinion on host programs: their meaning, without the runtime."""
