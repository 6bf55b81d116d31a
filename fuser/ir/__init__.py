"""The fusion IR: dtypes, scalars, domains, tensors, ops and the fusion that holds them."""

# They register what fusions and tensors do through them (`canonical_key`, `PRIMITIVES`).
from fuser.ir import form as form
from fuser.ir import primitives as primitives
