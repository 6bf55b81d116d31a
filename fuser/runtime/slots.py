"""How the arguments of a kernel are packed: one 8-byte slot for each parameter, on both devices."""

from __future__ import annotations

from fuser.support.errors import KernelError
from fuser.support.kernel_source import KernelParam

# struct codes of a slot. Integers of any width go as 64 bits: their low bytes come first.
_SCALARS = {
    "bool": "q",
    "int": "q",
    "int64_t": "q",
    "nvfuser_index_t": "q",
    "unsigned": "q",
    "uint64_t": "Q",
    "float": "f4x",
    "double": "d",
}
# What is packed as it is; anything else is asked for its data_ptr().
NUMBERS = frozenset((int, float, bool))


def slot_code(param: KernelParam) -> str:
    """The struct code of a parameter's slot.

    Raises:
        KernelError: the parameter is a scalar of a type that kernels do not take.
    """
    if param.is_pointer:
        return "Q"
    code = _SCALARS.get(param.ctype)
    if code is None:
        raise KernelError(
            f"parameter {param.name}: {param.ctype!r} is not a scalar type of kernels"
            f" ({', '.join(_SCALARS)})"
        )
    return code
