"""From a scheduled fusion to kernel loop nests: indices, predicates, allocations, barriers."""
