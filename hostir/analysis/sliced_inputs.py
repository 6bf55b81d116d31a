"""Finds inputs that every rank passes whole, although each rank only uses a slice of the input.

For example, `T2 = linear(h, w)` sums over an axis of `h` that devices split, so each rank needs
only the matching slice of the weight `w`. If `w` is not sharded, a `LocalSlice` op copies this
slice in each call. The results are right. But each rank stores the whole tensor, and every call
slices the tensor again. The commands `why` and `cost`, and the report on overlap, mention each such
input once, with the annotation that avoids the slice.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.ir.shard_annotation import Replicate, Shard
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.support.errors import user_code
from hostir.ir.effects import Shows
from hostir.ir.ops import HostOp, LocalSlice
from hostir.ir.program import HostIrContainer
from multidevice.sharding.placement import placement

# The cut of a slice: the device type, and the axis.
Slice = tuple[ParallelType, int]


def sliced_inputs(program: HostIrContainer) -> tuple[str, ...]:
    """Returns a sentence of advice for each input that only local slices read. A local slice copies
    this rank's part out of a tensor that every rank has as a whole.

    An input is reported if all slices divide the same axis along the same mesh dimension. The user
    can then annotate the input and pass this part instead.
    """
    shown: dict[TensorView, TensorView] = {}
    slices: dict[TensorView, dict[TensorView, Slice]] = {}
    others: set[TensorView] = {*program.outputs}

    def base(tv: TensorView) -> TensorView:
        while tv in shown:
            tv = shown[tv]
        return tv

    for op in walk(program.ops):
        names = [e for e in op.effects() if isinstance(e, Shows)] if isinstance(op, HostOp) else []
        if names:
            shown.update((e.out, e.source) for e in names)
        elif isinstance(op, LocalSlice):
            slices.setdefault(base(op.inp), {})[op.out] = (op.ptype, op.axis)
        else:
            tensors = (v for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView))
            others.update(map(base, tensors))
    inputs = [v for v in program.inputs if isinstance(v, TensorView)]
    return tuple(_sentences(program, inputs, slices, others))


def _sentences(
    program: HostIrContainer,
    inputs: list[TensorView],
    slices: dict[TensorView, dict[TensorView, Slice]],
    others: set[TensorView],
) -> Iterator[str]:
    numbers = {v: k for k, v in enumerate(program.inputs) if isinstance(v, TensorView)}
    for tv in inputs:
        made = slices.get(tv, {})
        wanted = set(made.values())
        if len(wanted) != 1 or tv in others or tv.mesh is None:
            continue
        ((ptype, axis),) = wanted
        rows = [r for r in program.values.origins if r.tensor in {out.number for out in made}]
        readers = dict.fromkeys(f"{r.op}{_at(r.where)}" for r in rows if r.what == "placement")
        taken = f" for {' and '.join(readers)}" if readers else ""
        yield (
            f"T{tv.number}, input {numbers[tv]}, is whole along axis {axis} on each "
            f"rank and sliced by {ptype.name} in each call{taken}: to avoid the slices, annotate "
            f"the input by shard(T{tv.number}, mesh, [{_placements(tv, ptype, axis)}]), and pass "
            f"shards"
            f"{user_code(tv.user_line())}"
        )


def _placements(tv: TensorView, ptype: ParallelType, axis: int) -> str:
    """Returns the placement with which the user should annotate the input `tv`, as text such as
    `Shard(0), Replicate()`.

    The result is the declared placement of the input, but with `axis` sharded along the mesh
    dimension `ptype`.
    """
    assert tv.mesh is not None, f"{tv} has no mesh"
    cuts = {c.ptype: k for k, mine in enumerate(placement(tv, DEVICE_TYPES)) for c in mine}
    cuts[ptype] = axis
    types = reversed(DEVICE_TYPES[: tv.mesh.ndim])
    return ", ".join(str(Shard(cuts[p]) if p in cuts else Replicate()) for p in types)


def _at(where: str) -> str:
    return f" at {where}" if where else ""
