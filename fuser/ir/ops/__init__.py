"""The declarations of all ops of a fusion, by kind.

Question: which fields and which text does each op have, and which axis of an operand becomes which
axis of the result?
Imports: `fuser.support` and the rest of `fuser.ir`.
Files, in reading order:

- `nodes`: elementwise ops, reductions, broadcasts, reshapes, slices and pads.
- `matrix_products`: products of matrices in groups, and of scaled Float8 matrices.
- `attention_ops`: scaled dot product attention and its gradient.
- `lookup`: gather, scatter, index select and embedding.
- `scan_ops`: cumulative sums, sorts and top k.
"""
