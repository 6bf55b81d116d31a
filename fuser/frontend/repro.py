"""Scripts that show a definition and its inputs again, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fuser.frontend.python_printer import number_text
from fuser.support.errors import (
    CompileError,
    ExecutionError,
    FuserError,
    KernelError,
    NoCompilerError,
    VerifyError,
)
from fuser.support.inputs import flatten

# What is no mistake of the caller, nor of the machine.
_INTERNAL = (CompileError, ExecutionError, KernelError, VerifyError)


def repro_script(program: str, inputs: Iterable[object] | None) -> str:
    """Return a script of a program's text (`translate_fusion`), and of inputs like these if there
    are any: random values of their shapes, strides, dtypes and devices; numbers as they are."""
    lines = ["# CUDA devices:"]
    for k in range(torch.cuda.device_count()):
        lines.append(f"#  {k}: {torch.cuda.get_device_name(k)}")
    lines += [
        f"# torch version: {torch.__version__}",
        f"# cuda version: {torch.version.cuda}",
        "import torch",
        "from fuser import FusionDefinition, DataType",
        f"{program}with FusionDefinition() as fd:",
        "    nvfuser_fusion(fd)",
        "",
    ]
    if inputs is not None:
        lines += ["inputs = [", *(f"    {_input_text(v)}," for v in flatten(inputs)), "]"]
        lines += ["fd.execute(inputs)", ""]
    return "\n".join(lines)


def _input_text(value: torch.Tensor | bool | int | float | complex) -> str:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int):
            return repr(value) if value.bit_length() <= 64 else hex(value)
        return number_text(value)
    where = f"dtype={value.dtype}, device='{value.device}'"
    shape, strides = tuple(value.shape), value.stride()
    # torch draws no floats of one byte.
    is_narrow = value.dtype.is_floating_point and value.dtype.itemsize == 1
    if value.is_contiguous() and is_narrow:
        return f"torch.randn({shape}, device='{value.device}').to({value.dtype})"
    if value.is_contiguous():
        return f"torch.testing.make_tensor({shape}, {where})"
    # As many elements as the last one needs to be there.
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    count = count if value.numel() else 0
    if is_narrow:
        drawn = f"torch.randn({count}, device='{value.device}').to({value.dtype})"
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        drawn = f"torch.randn({count}, {where})"
    else:
        end = 2 if value.dtype is torch.bool else 10
        drawn = f"torch.randint(0, {end}, ({count},), {where})"
    return f"{drawn}.as_strided({shape}, {strides})"


def fake_inputs(inputs: Sequence[object]) -> list[object]:
    """Return tensors without contents in the place of tensors: what a script needs of them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in inputs]


def is_internal(error: BaseException) -> bool:
    """Whether an error may be a fault of this project: a failed check of its own, a program or a
    kernel that it should not have made."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | NoCompilerError):
        return False
    return isinstance(error, _INTERNAL) or not isinstance(error, FuserError)


def report(error: BaseException, script: str) -> None:
    """Add a script to what is shown of an error."""
    error.add_note(f"If this is a fault of fuser, this script shows it again:\n```\n{script}```")
