"""The op table and the functions that build ops: one row per op, views, composites."""
