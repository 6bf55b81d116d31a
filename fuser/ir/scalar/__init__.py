"""Scalar expressions: extents, indices and the scalars of a program.

Question: how are numbers that are known only at run time written, simplified and computed?
Imports: `fuser.support`, and types and statements of `fuser.ir`.
Files, in reading order:

- `scalar_nodes`: constants, symbols, ops on scalars and polynomials, and their text.
- `simplify`: simplification by algebra and by the ranges of symbols.
- `evaluate`: computes each scalar op on Python numbers.
- `constructors`: functions that build simplified expressions; other packages import this module.
- `compiled`: expressions compiled to Python functions.
"""

# Importing it fills the tables `OPERATORS` and `CONSTRUCTORS` of `scalar_nodes`.
from fuser.ir.scalar import constructors as constructors
