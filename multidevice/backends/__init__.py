"""Communication backends: they take buffers, teams and streams, and know nothing of the IR.

`protocol` says what every backend offers; `base` does the argument checks and the staging that
all of them share; `mpi`, `gloo`, `nccl` and `simulated` move the data.
"""
