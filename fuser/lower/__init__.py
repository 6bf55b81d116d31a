"""Lowering of a scheduled fusion to a kernel: loop nests, indices, predicates, buffers,
barriers.
"""
