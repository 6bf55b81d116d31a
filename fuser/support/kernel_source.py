"""The text of a kernel with its parameters: the output of `codegen` and the input of `runtime`."""

from __future__ import annotations

from fuser.support.record import record


@record
class KernelParam:
    """One parameter of a kernel.

    For a pointer, `ctype` is the element type, such as `const __bfloat`.
    """

    name: str
    ctype: str
    is_pointer: bool


@record
class KernelSource:
    """The text of one kernel, with its parameters.

    `fuser/codegen/rt.h` describes the form of the text.

    - `uses_barriers`: whether threads work together, by barriers, shuffles, votes, shared memory or
      the reduction functions of `rt.h`. On the CPU, such a kernel needs an engine that runs all
      threads of a block together.
    - `cluster`: if above 1, this number of CUDA blocks along y run at the same time and read each
      other's shared memory.
    """

    name: str
    text: str
    params: tuple[KernelParam, ...]
    uses_barriers: bool
    cluster: int = 1
