"""Kernels that stand beside torch's calls on a GPU, where torch alone would need the host, or a
copy: the ends of groups are checked, rows of no group are cleared, and elements scattered.

Their text is also a CPU's, where tests run it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from fuser.errors import InputError, user_code
from fuser.ir.mma import GroupedMmaOp
from fuser.kernel_source import KernelParam, KernelSource
from fuser.runtime.kernel import CompiledKernel, compile_kernels

THREADS, MAX_BLOCKS = 256, 2048
# Elements are moved as words of their size.
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint64_t"}
_INDICES = {torch.int32: "int", torch.int64: "int64_t"}
_MAX_INT = 2**31 - 1

# Ends that fall or leave the axis are brought back, so that nothing is read outside of it; what was
# wrong first is reported to the host.
_ENDS = """\
#define nvfuser_index_t int
extern "C" __global__ void __launch_bounds__(32) group_ends(
    FUSER_PTR(const int) offsets, FUSER_PTR(int) ends, FUSER_PTR(int64_t) report,
    const int groups, const int extent) {
  if (threadIdx.x != 0) return;
  int last = 0;
  bool is_right = true;
  for (int g = 0; g < groups; g++) {
    const int end = offsets[g];
    const int kept = end < last ? last : end > extent ? extent : end;
    if (kept != end && is_right) {
      is_right = false;
      report[1] = end;
      report[0] = g + 1;
    }
    ends[g] = kept;
    last = kept;
  }
}
"""
_CLEAR = """\
#define nvfuser_index_t int64_t
extern "C" __global__ void __launch_bounds__(256) clear_rows(
    FUSER_PTR(unsigned short) out, FUSER_PTR(const int) ends, const int groups,
    const int64_t rows, const int64_t columns) {
  for (int64_t row = ends[groups - 1] + int64_t(blockIdx.x); row < rows; row += gridDim.x)
    for (int64_t k = threadIdx.x; k < columns; k += blockDim.x) out[row * columns + k] = 0;
}
"""


def _scatter_text(word: str, index: str, position: str, *, is_number: bool) -> str:
    source = "number" if is_number else "src"
    given = "const int64_t number" if is_number else f"FUSER_PTR(const {word}) src"
    value = f"{word}(number)" if is_number else f"{source}[i]"
    return f"""\
#define nvfuser_index_t {position}
extern "C" __global__ void __launch_bounds__({THREADS}) scatter(
    FUSER_PTR({word}) out, FUSER_PTR(const {index}) index, {given},
    const {position} count, const {position} row, const {position} inner,
    const {position} extent) {{
  for ({position} i = {position}(blockIdx.x) * {THREADS} + threadIdx.x; i < count;
       i += {position}(gridDim.x) * {THREADS}) {{
    const {index} place = index[i];
    if (place < 0 || place >= extent) continue;
    out[(i / row * extent + {position}(place)) * inner + i % inner] = {value};
  }}
}}
"""


class LibraryKernels:
    """The kernels of one device, compiled when they are first asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[object, CompiledKernel] = {}

    def _find(self, key: object, make: Callable[[], KernelSource]) -> CompiledKernel:
        found = self._compiled.get(key)
        if found is None:
            (found,) = compile_kernels([make()], self._device)
            self._compiled[key] = found
        return found

    # -------------------------------------------------------------- groups
    def ends_of(self, op: GroupedMmaOp, extent: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what gives the ends of groups, rising from 0 to `extent`.

        It raises `InputError` for ends of an earlier call that did not: the host does not wait for
        those of this one.
        """
        kernel = self._find("ends", _ends_source)
        is_cuda = self._device.type == "cuda"
        report = torch.zeros(2, dtype=torch.int64, pin_memory=is_cuda)
        seen = report.numpy()

        def ends(offsets: torch.Tensor) -> torch.Tensor:
            if seen[0]:
                place, end = int(seen[0]) - 1, int(seen[1])
                seen[0] = 0
                raise InputError(
                    f"grouped_mm: Expected offsets that rise from 0 to {extent}, the size of axis "
                    f"{op.ragged} of {op.mat1} and {op.mat2}, but in an earlier run {op.offsets} "
                    f"had {end} for group {place}{user_code(op.where)}"
                )
            kept = torch.empty_like(offsets)
            given = offsets, kept, report, offsets.numel(), extent
            kernel.launch(given, grid=(1, 1, 1), block=(32, 1, 1))
            return kept

        return ends

    def clear_rows(self, out: torch.Tensor, ends: torch.Tensor) -> None:
        """Set the rows behind the last end to 0; `out` [m, n] is contiguous, of two bytes each."""
        rows, columns = out.shape
        kernel = self._find("clear", _clear_source)
        given = out, ends, ends.numel(), rows, columns
        kernel.launch(given, grid=(min(rows, 256), 1, 1), block=(THREADS, 1, 1))

    # -------------------------------------------------------------- scatter
    def takes_scatter(
        self, out: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor | None
    ) -> bool:
        """Return whether `scatter` takes tensors like these: contiguous, and the index as long as
        `out` along the other axes."""
        pairs = enumerate(zip(out.shape, index.shape, strict=True))
        is_plain = out.is_contiguous() and index.is_contiguous() and index.numel() > 0
        fits = src is None or (src.is_contiguous() and src.shape == index.shape)
        is_long = all(a == b for k, (a, b) in pairs if k != dim)
        return is_plain and fits and is_long and out.element_size() in _WORDS

    def scatter(
        self, out: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor | int
    ) -> None:
        """Write `src` at the positions of `index` that are in range."""
        position = "int" if max(out.numel(), index.numel()) <= _MAX_INT // 2 else "int64_t"
        word, kind = _WORDS[out.element_size()], _INDICES[index.dtype]
        is_number = not isinstance(src, torch.Tensor)
        key = word, kind, position, is_number
        kernel = self._find(key, lambda: _scatter_source(word, kind, position, is_number))
        inner = 1
        for n in out.shape[dim + 1 :]:
            inner *= n
        count = index.numel()
        given = out, index, src, count, index.shape[dim] * inner, inner, out.shape[dim]
        blocks = min(-(-count // THREADS), MAX_BLOCKS)
        kernel.launch(given, grid=(blocks, 1, 1), block=(THREADS, 1, 1))


def _ends_source() -> KernelSource:
    params = (
        KernelParam("offsets", "const int", True),
        KernelParam("ends", "int", True),
        KernelParam("report", "int64_t", True),
        KernelParam("groups", "int", False),
        KernelParam("extent", "int", False),
    )
    return KernelSource("group_ends", _ENDS, params, uses_barriers=False)


def _clear_source() -> KernelSource:
    params = (
        KernelParam("out", "unsigned short", True),
        KernelParam("ends", "const int", True),
        KernelParam("groups", "int", False),
        KernelParam("rows", "int64_t", False),
        KernelParam("columns", "int64_t", False),
    )
    return KernelSource("clear_rows", _CLEAR, params, uses_barriers=False)


def _scatter_source(word: str, index: str, position: str, is_number: bool) -> KernelSource:
    given = ("number", "int64_t", False) if is_number else ("src", f"const {word}", True)
    params = (
        KernelParam("out", word, True),
        KernelParam("index", f"const {index}", True),
        KernelParam(*given),
        *(KernelParam(name, position, False) for name in ("count", "row", "inner", "extent")),
    )
    text = _scatter_text(word, index, position, is_number=is_number)
    return KernelSource("scatter", text, params, uses_barriers=False)


@cache
def kernels_of(device: torch.device) -> LibraryKernels:
    """Return the kernels of a device."""
    return LibraryKernels(device)
