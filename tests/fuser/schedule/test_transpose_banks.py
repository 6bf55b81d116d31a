"""Counts bank conflicts of transpose kernels, from the addresses in the generated code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, from_torch, nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.lower.kernel_ir import (
    Body,
    Element,
    For,
    GlobalLoad,
    If,
    Let,
    LoweredKernel,
    ScalarArg,
    Store,
    Sync,
    TensorArg,
    VectorLoad,
    VectorStore,
    values_of,
    walk,
)
from fuser.lower.pipeline import lower_kernel
from fuser.schedule import scheduler
from fuser.schedule.input_facts import Facts
from fuser.schedule.transpose import TransposeParams
from fuser.support.device import H200
from tests.support.small_fusions import Build, define, sizes_of

WORD, WARP = 4, 32
TYPES = [torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


class Traffic:
    """The simultaneous accesses of the lanes of a warp, computed from the addresses in a kernel."""

    def __init__(self, kernel: LoweredKernel, sizes: Mapping[Symbol, int], block: int) -> None:
        scalars = (arg for arg in kernel.args if not isinstance(arg, TensorArg))
        self._fixed: dict[str, Number] = {"bx": block}
        for symbol, arg in zip(kernel.scalars, scalars, strict=True):
            assert isinstance(arg, ScalarArg)
            self._fixed[symbol.name] = sc.evaluate(arg.scalar, sizes)
        self._dtypes = {f"T{tv.number}": tv.dtype() for tv in kernel.fusion.tensors()}
        # (statement, iteration) -> (name, shared, bytes of an access, first bytes).
        self.asked: dict[object, tuple[str, bool, int, list[int]]] = {}
        for warp in {0, kernel.threads // WARP - 1}:
            for lane in range(WARP):
                self._run(kernel.body, {**self._fixed, "tx": warp * WARP + lane}, (warp,))

    def _run(self, body: Body, env: dict[str, Number], at: tuple[object, ...]) -> None:
        for number, s in enumerate(body.statements):
            here = (*at, number)
            match s:
                case Let():
                    env[s.symbol.name] = value(s.value, env)
                case For():
                    for k in range(int(value(s.extent, env))):
                        self._run(s.body, {**env, s.symbol.name: k}, (*here, k))
                case If():
                    if value(s.cond, env):
                        self._run(s.then, dict(env), here)
                case _:
                    for part, access in enumerate(accesses(s)):
                        self._ask(access, env, (*here, part))

    def _ask(self, access: Access, env: Mapping[str, Number], at: object) -> None:
        name, is_shared, width, index = access
        nbytes = nbytes_of(self._dtypes[name])
        entry = self.asked.setdefault(at, (name, is_shared, width * nbytes, []))
        entry[3].append(int(value(index, env)) * nbytes)


Access = tuple[str, bool, int, Scalar]


def accesses(s: object) -> Iterator[Access]:
    """Yields (tensor, whether shared, elements, index) of each read and write of a statement."""
    for part in values_of(s):  # pyright: ignore[reportArgumentType]
        if isinstance(part, GlobalLoad) or (isinstance(part, Element) and part.shared):
            yield part.name, isinstance(part, Element), 1, part.index
    if isinstance(s, VectorLoad | VectorStore):
        yield s.name, s.shared, s.width, s.index
    if isinstance(s, Store):
        yield s.name, False, 1, s.index


def value(x: Scalar, env: Mapping[str, Number]) -> Number:
    return sc.evaluate(x, {s: env[s.name] for s in sc.symbols(x)})


def bank_turns(begins: Sequence[int], nbytes: int) -> int:
    """Returns the number of accesses to the busiest bank at a time. Accesses of 8 bytes are served
    to 16 lanes at a time, those of 16 bytes to 8."""
    lanes = min(WARP, WARP * WORD // nbytes)
    most = 0
    for k in range(0, len(begins), lanes):
        banks: dict[int, set[int]] = {}
        for begin in begins[k : k + lanes]:
            for byte in range(begin, begin + nbytes):
                banks.setdefault(byte // WORD % WARP, set()).add(byte // WORD)
        most = max(most, *map(len, banks.values()))
    return most


def chosen_kernel(
    build: Build, dtype: torch.dtype, *shapes: Sequence[int]
) -> tuple[LoweredKernel, TransposeParams, dict[Symbol, int]]:
    """Returns the kernel that an H200 gets for contiguous inputs of these shapes."""
    fusion = define(build, *[[None] * len(s) for s in shapes], dtype=from_torch(dtype))
    row = scheduler("transpose")
    params = row.heuristics(fusion, Facts(sizes_of(fusion, *shapes)), H200)
    assert isinstance(params, TransposeParams), params
    row.apply(fusion, params)
    kernel = lower_kernel(fusion, name="tile", index_dtype=DataType.Int, device=H200)
    return kernel, params, sizes_of(fusion, *shapes)


# Extents that are multiples of 16, 8, 4 and 2 bytes, and extents that are not.
EXTENTS = [2048, 2040, 2044, 2046, 2047]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("extents", [*itertools.product(EXTENTS, EXTENTS)], ids=str)
def test_no_bank_conflicts_and_whole_lines(dtype: torch.dtype, extents: tuple[int, int]) -> None:
    kernel, params, sizes = chosen_kernel(lambda x: ops.permute(x, [1, 0]), dtype, extents)
    widest = 16 // dtype.itemsize
    vectors = params.vector, params.staged_vector
    for vector, extent in zip(vectors, extents, strict=True):
        assert vector <= math.gcd(extent, widest)
    assert min(vectors) == min(math.gcd(n, widest) for n in extents)
    assert params.edge * params.staged_edge * dtype.itemsize <= H200.max_smem_per_block // 12
    traffic = Traffic(kernel, sizes, block=3)
    kinds = set()
    for name, is_shared, nbytes, begins in traffic.asked.values():
        assert len(begins) == WARP
        kinds.add((name, is_shared, nbytes))
        if is_shared:
            assert bank_turns(begins, nbytes) == 1, (params, name, begins)
        elif extents == (2048, 2048):
            lines = {b // 128 for begin in begins for b in (begin, begin + nbytes - 1)}
            row = min(params.edge, params.staged_edge) * dtype.itemsize
            assert len(lines) <= WARP * nbytes // min(row, 128), (params, name)
    assert {n for name, shared, n in kinds if not shared} == {v * dtype.itemsize for v in vectors}
    # One barrier, outside of loops.
    assert sum(isinstance(s, Sync) for s in walk(kernel.body)) == 1
    assert any(isinstance(s, Sync) for s in kernel.body.statements)


def test_tiles_of_two_types_and_both_ways() -> None:
    """A staged input of four bytes, a staged output of one, direct tensors of two."""

    def build(x: TensorView, y: TensorView) -> list[TensorView]:
        narrow = ops.cast(ops.add(x, ops.permute(y, [1, 0])), DataType.BFloat16)
        return [narrow, ops.exp(narrow), ops.permute(ops.gt(narrow, 0.0), [1, 0])]

    kernel, params, sizes = chosen_kernel(build, torch.float32, (2048, 4096), (4096, 2048))
    traffic = Traffic(kernel, sizes, block=5)
    shared = [entry for entry in traffic.asked.values() if entry[1]]
    assert len({name for name, *_ in shared}) == 2
    for name, _, nbytes, begins in shared:
        assert bank_turns(begins, nbytes) == 1, (params, name)
