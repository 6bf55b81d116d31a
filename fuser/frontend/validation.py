"""Compares results with torch's, within tolerances that depend on dtype and reduction size.

The tolerances are nvFuser's, which were measured for sums of 4 to 2097152 numbers of magnitude 1.
One unit in the last place of the result's dtype is allowed in addition, because two sums that
differ by less than the tolerance can round to neighbouring values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from fuser.frontend.implicit_inputs import Draws
from fuser.ir.binding import Argument, bind_inputs
from fuser.ir.dtypes import HALF_LIKE, DataType, category, is_inexact, to_torch
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import BinaryOp
from fuser.ir.ops.scan_ops import ScanOp
from fuser.ir.scalar import constructors as sc
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.support.arguments import checked
from fuser.support.errors import UnsupportedError, ValidationError, counted
from fuser.support.inputs import flatten

Tolerance = tuple[float, float]

# Sizes of the reductions in the tables below: 4 << k elements. For a reduction, the smallest size
# in this list is found that is at least its own. The entry after that size's entry is used.
_SUM_SIZES = [4 << k for k in range(20)]
# fmt: off
_FULL = (
    1.68222e-06, 2.23704e-06, 2.95788e-06, 4.4778e-06, 6.75395e-06, 8.57934e-06, 1.30594e-05,
    2.19122e-05, 3.3451e-05, 5.78476e-05, 0.000108292, 0.00012207, 0.000136882, 0.000248561,
    0.000407594, 0.000500901, 0.000923019, 0.00156909, 0.00223107, 0.00343043,
)
_HALF = (
    0.00390625, 0.0078125, 0.0078125, 0.0155334, 0.0156269, 0.0312042, 0.0312548, 0.0619979,
    0.0625103, 0.124686, 0.12501, 0.24945, 0.250049, 0.498946, 0.500071, 0.985087, 1.00006,
    1.99234, 2.00032, 3.99073,
)
# fmt: on
# (atol, rtol) without a reduction.
_FULL_ALONE, _HALF_ALONE = (_FULL[0], _FULL[1]), (_HALF[0], _HALF[1])
# Number of runs with perturbed values that measure how far results move.
_TRIALS = 8
# The relative tolerance of a sum as a factor of its absolute one.
_RELATIVE = 0.01


def tolerance(dtype: DataType, size: int) -> Tolerance:
    """Returns by how much a result may differ (absolute, relative), if it has the dtype `dtype` and
    is a sum of `size` numbers.

    For integers and booleans, both are 0.
    """
    if category(dtype) in ("int", "bool"):
        return 0.0, 0.0
    is_full = dtype in (
        DataType.Float,
        DataType.Double,
        DataType.ComplexFloat,
        DataType.ComplexDouble,
    )
    if size <= 1:
        return _FULL_ALONE if is_full else _HALF_ALONE
    table = _FULL if is_full else _HALF
    place = bisect_left(_SUM_SIZES, size) + 1
    atol = table[place] if place < len(table) else 2 * table[-1]
    # Half has more significant bits than BFloat16 and Float8.
    if not is_full and dtype is not DataType.Half:
        atol *= 10
    return atol, atol * _RELATIVE


def _tolerances(fusion: Fusion, args: Sequence[Argument]) -> dict[TensorView, Tolerance]:
    """Returns by how much each output of a fusion may differ (absolute, relative) with the inputs
    `args`.
    """
    values = bind_inputs(fusion, args)
    sizes: dict[TensorView, int] = {}
    for op in fusion.used_exprs():
        read = [sizes.get(v, 1) for v in op.inputs if isinstance(v, TensorView)]
        for out in op.outputs:
            size = max(read, default=1)
            along = [axis for axis in out.domain.logical if axis.is_reduction()]
            if isinstance(op, ScanOp):
                along.append(op.inp.domain.no_reductions[op.dim])
            for axis in along:
                size *= int(sc.evaluate(fusion.canonical(axis.size), values))
            sizes[out] = size
    return {out: tolerance(out.dtype(), sizes.get(out, 1)) for out in fusion.outputs}


@checked
def get_val_tolerances(fusion: Fusion, args: Sequence[object]) -> list[Tolerance]:
    """Returns by how much each output of a fusion may differ (absolute, relative) with the inputs
    `args`. Outputs that update an input are left out.
    """
    found = _tolerances(fusion, flatten(args))
    return [found[out] for out in fusion.outputs if fusion.alias_of(out) is None]


def references(fusion: Fusion, args: Sequence[Argument]) -> list[torch.Tensor]:
    """Returns torch's results for the outputs, in the fusion's own dtypes. Outputs that only update
    an input are left out.

    Raises:
        UnsupportedError: the program is distributed over devices, or has random ops without a seed.
    """
    sharded = next((tv for tv in fusion.tensors() if tv.mesh is not None), None)
    if sharded is not None:
        raise UnsupportedError(
            f"validate: {sharded} has a mesh, and torch has only the shards of this rank: pass "
            "reference_outputs"
        )
    if Draws.of(fusion) is not None:
        raise UnsupportedError(
            "validate: ops without rng_seed and rng_offset draw new numbers in each run: pass "
            "reference_outputs"
        )
    # An update changes an input after everything was computed from it.
    results = zip(fusion.outputs, evaluate_fusion(fusion, args), strict=True)
    return [result for out, result in results if not fusion.is_hidden(out)]


def compare(
    fusion: Fusion,
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    args: Sequence[Argument],
) -> None:
    """Compares the outputs that a call has returned with the references `wanted`.

    `args` are the inputs of the call, with the values that they had before the call.

    Raises:
        ValidationError: an output differs from its reference. The message names the first such
            output.
    """
    shown = [out for out in fusion.outputs if not fusion.is_hidden(out)]
    if not len(outputs) == len(wanted) == len(shown):
        raise ValidationError(
            f"Validation error: expected {counted(len(shown), 'output')} and as many references, "
            f"got {counted(len(outputs), 'output')} and {counted(len(wanted), 'reference')}"
        )
    found = _tolerances(fusion, args)
    places = {id(tv): k for k, tv in enumerate(fusion.outputs)}
    changes: list[torch.Tensor] | None = None
    for i, (tv, out, reference) in enumerate(zip(shown, outputs, wanted, strict=True)):
        where = f"Validation error in output {i}, {tv}: "
        if out.shape != reference.shape:
            raise ValidationError(
                f"{where}its shape is {tuple(out.shape)}, but the reference has the shape "
                f"{tuple(reference.shape)}"
            )
        atol, rtol = found[tv]
        problem = _difference(out, reference.to(out.device), atol, rtol)
        if problem and is_inexact(tv.dtype()):
            changes = _legal_changes(fusion, args) if changes is None else changes
            legal = changes[places[id(tv)]].to(out.device) if changes else None
            problem = _difference(out, reference.to(out.device), atol, rtol, legal)
        if problem:
            raise ValidationError(where + problem)


def _legal_changes(fusion: Fusion, args: Sequence[Argument]) -> list[torch.Tensor]:
    """Returns how much each element of each output may differ because kernels omit roundings.

    A kernel may omit the rounding of a product that is then added (fused multiply-add), and the
    rounding of a half-precision intermediate. To find the effect, the program is computed in
    float64 several times. Each time, such values are changed by one rounding, up or down. If torch
    cannot compute the program (see `references`), the list is empty.
    """
    if any(tv.mesh is not None for tv in fusion.tensors()) or Draws.of(fusion) is not None:
        return []
    signs = torch.Generator().manual_seed(0)

    def moved(x: torch.Tensor, by: torch.Tensor, eps: float) -> torch.Tensor:
        sign = torch.randint(0, 2, x.shape, generator=signs) * 2 - 1
        return x + sign.to(x.device) * eps * by.abs()

    def eps_of(tv: TensorView) -> float:
        return torch.finfo(to_torch(tv.dtype())).eps if is_inexact(tv.dtype()) else 0.0

    def change(
        op: TensorOp, operands: list[torch.Tensor | None], results: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        out = op.outputs[0]
        if isinstance(op, BinaryOp) and op.kind in ("add", "sub"):
            # Both products move the sum in the same direction: opposite moves could cancel.
            errors = [
                eps_of(v) * value.abs()
                for v, value in zip(op.inputs, operands, strict=True)
                if value is not None and isinstance(v, TensorView) and _is_product(v)
            ]
            if errors and eps_of(out):
                results[0] = moved(results[0], sum(errors[1:], errors[0]), 1.0)
        is_between = out.dtype() in HALF_LIKE and out not in fusion.outputs
        if is_between and len(results) == 1 and results[0].is_floating_point():
            results[0] = moved(results[0], results[0], eps_of(out))
        return results

    exact = evaluate_fusion(fusion, args, dtype=torch.float64)
    largest = [torch.zeros_like(x, dtype=torch.float64) for x in map(torch.abs, exact)]
    for _ in range(_TRIALS):
        runs = evaluate_fusion(fusion, args, dtype=torch.float64, change=change)
        for k, (one, other) in enumerate(zip(runs, exact, strict=True)):
            if one.is_floating_point() or one.is_complex():
                largest[k] = torch.maximum(largest[k], (one - other).abs().nan_to_num())
    # Both the reference and the result may have such an error.
    return [4 * x for x in largest]


def _is_product(tv: TensorView) -> bool:
    made = tv.definition()
    return isinstance(made, BinaryOp) and made.kind == "mul"


def _difference(
    out: torch.Tensor,
    wanted: torch.Tensor,
    atol: float,
    rtol: float,
    legal: torch.Tensor | None = None,
) -> str:
    """Returns a text on how an output differs from the expected tensor `wanted`, or "" if both
    agree.

    `atol` and `rtol` are the allowed absolute and relative difference. `legal` is an additional
    allowed difference for each element.
    """
    if not (out.is_floating_point() or out.is_complex()):
        if torch.equal(out, wanted.to(out.dtype)):
            return ""
        return f"{int((out != wanted).sum())} of {out.numel()} elements differ"
    rtol = max(rtol, torch.finfo(out.dtype).eps)
    exact = torch.complex128 if out.is_complex() or wanted.is_complex() else torch.float64
    mine, its = out.detach().to(exact), wanted.detach().to(exact)
    near = torch.isclose(mine, its, rtol=rtol, atol=atol, equal_nan=True)
    if legal is not None:
        near |= (mine - its).abs() <= legal + atol
    if bool(near.all()):
        return ""
    worst = (mine - its).abs()[~near].nan_to_num(torch.inf).max()
    return (
        f"{int((~near).sum())} of {out.numel()} elements of {out.dtype} differ, by up to "
        f"{float(worst):g}: allowed are {atol:g} plus {rtol:g} times the value"
    )


@checked
def validate_with_auto_inferred_outputs(
    fusion: Fusion, fusion_outputs: Sequence[torch.Tensor], args: Sequence[object]
) -> None:
    """Compares the outputs of a call with torch's results for the inputs `args`.

    The inputs must have the values that they had before the call.

    Raises:
        ValidationError: an output differs. The message names the first such output.
        UnsupportedError: torch cannot compute the program, for example because it is distributed
            over devices.
    """
    given = flatten(args)
    compare(fusion, fusion_outputs, references(fusion, given), given)


def as_before(fusion: Fusion, args: Sequence[Argument]) -> list[Argument]:
    """Returns the arguments of a call, with copies of the tensors that the call updates in place.

    The copies keep the values from before the call.
    """
    updated = {i for i, v in enumerate(fusion.inputs) if any(a.into is v for a in fusion.aliases)}
    return [
        v.clone() if i in updated and isinstance(v, torch.Tensor) else v for i, v in enumerate(args)
    ]


def validate_run(
    fusion: Fusion,
    run: Callable[[list[Argument]], list[torch.Tensor]],
    inputs: Sequence[object],
    given: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Runs a program on `inputs`, compares the outputs with references, and returns the outputs.

    The references are `given`. If `given` is None, they are torch's results.
    """
    args = flatten(inputs)
    before = as_before(fusion, args)
    outputs = run(args)
    compare(fusion, outputs, references(fusion, before) if given is None else given, before)
    return outputs
