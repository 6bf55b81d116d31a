"""Computes input classes: the properties of inputs on which the compiled program depends.

All inputs of one class share the whole host program. The inputs of one class have equal dtypes,
devices and memory layouts of local shards (the parts that a rank stores). They also lead to the
same concretized fusion: the same choice for everything in the fusion that depends on sizes, such as
how a reshape regroups the axes. Sizes stay symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fuser.ir.dtypes import category, is_inexact, nbytes_of
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import Layout, LayoutClasses, with_layout
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ops.reference.meaning import REDUCING
from fuser.passes.concretize import KeyOfSizes
from fuser.schedule import (
    cluster_persistent,
    horizontal,
    inner_outer_persistent,
    inner_persistent,
    outer_persistent,
)
from fuser.schedule.inner_persistent import row_extents
from fuser.support.errors import InputError
from hostir.ir.program import HostIrContainer
from multidevice.sharding.queries import whole_axis_sizes

# The least value of an unspecified size. A larger value is used if a mesh does not divide this one.
SMALLEST_SIZE = 8


@dataclass(frozen=True)
class InputClass:
    """A class of inputs that share one compiled program.

    - `key`: a value that is equal for all inputs of one class, and differs between classes.
    - `sizes`: the sizes of the inputs for which the class was created.
    - `layouts`: the memory layout of each input. None for a scalar, and for a tensor whose declared
      memory order contains split or merged axes.
    - `repeated`: for each input, the axes with stride 0 that are not declared as such. Along these
      axes, all indices share one element in memory.
    - `device`: the kind of device, `cuda` or `cpu`.
    - `knows_rows`: whether `key` depends on the number and length of the rows that the fusion
      reduces. If True, inputs with other row lengths may need another program, because schedulers
      choose kernels by these lengths. False if the sizes are not known.
    - `is_small`: whether all inputs together are so small that independent kernels may share one
      launch (`schedule/horizontal.py`).
    """

    key: Hashable
    sizes: Mapping[Symbol, int]
    layouts: tuple[Layout | None, ...]
    repeated: tuple[tuple[int, ...], ...]
    device: str = "cpu"
    knows_rows: bool = False
    is_small: bool = False

    @staticmethod
    def as_declared(fusion: Fusion, sizes: Mapping[Symbol, int]) -> InputClass:
        """Returns the input class of inputs that have these `sizes`, and the memory layouts that
        `fusion` declares. All inputs of an input class share one compiled program.
        """
        count = len(fusion.inputs)
        return InputClass(None, sizes, (None,) * count, ((),) * count)


class Classifier:
    """Computes the input class of each call of one fusion. Calls of one class share one compiled
    program.

    Facts about the fusion that do not depend on a call are computed only once."""

    def __init__(self, fusion: Fusion) -> None:
        self._layouts = [
            LayoutClasses(v) if isinstance(v, TensorView) else None for v in fusion.inputs
        ]
        self._key_of = KeyOfSizes(fusion)
        # Number and length of the rows of reductions: these decide if one kernel reduces whole
        # rows.
        reductions = [op.out_tensor for op in fusion.used_exprs() if isinstance(op, REDUCING)]
        extents = dict.fromkeys(map(row_extents, reductions))
        self._rows = Computed([x for pair in extents for x in pair])
        # The sizes are global, so that ranks with unequal shards agree.
        tensors = [v for v in fusion.inputs if isinstance(v, TensorView)]
        self._nbytes = Computed(
            [sc.product([*tv.shape(), nbytes_of(tv.dtype())]) for tv in tensors]
        )

    def classify(
        self,
        inputs: Sequence[torch.Tensor | bool | int | float],
        sizes: Mapping[Symbol, int],
        device: torch.device,
    ) -> InputClass:
        """Returns the input class of the tensors and scalars that a call passes.

        `inputs` are in the order of the fusion's inputs. `sizes` maps the symbols of the fusion to
        the sizes of whole tensors, not of local shards, so that all ranks compute the same class.
        `device` is the device of the tensors.
        """
        layouts = tuple(
            known.layout_of(given)
            if known is not None and known.order is not None and isinstance(given, torch.Tensor)
            else None
            for known, given in zip(self._layouts, inputs, strict=True)
        )
        repeated = tuple(
            known.repeated(given) if known is not None and isinstance(given, torch.Tensor) else ()
            for known, given in zip(self._layouts, inputs, strict=True)
        )
        where = device.type, device.index
        pays = self._pays(sizes)
        nbytes = self._nbytes.at_once(sizes)
        is_small = nbytes is not None and sum(nbytes) <= horizontal.MAX_BYTES
        key = (*where, layouts, repeated, self._key_of(sizes), pays, is_small)
        knows_rows = pays is not None
        return InputClass(key, sizes, layouts, repeated, device.type, knows_rows, is_small)

    def _pays(self, sizes: Mapping[Symbol, int]) -> tuple[int, ...] | None:
        known = self._rows.at_once(sizes)
        if known is None:
            return None
        found = [int(n) for n in known]
        pairs = [*zip(found[::2], found[1::2], strict=True)]
        decided = (inner_persistent.pays, cluster_persistent.row_class, inner_outer_persistent.pays)
        steps = [outer_persistent.step_of(rows, columns) for rows, columns in pairs]
        return (*(pays(rows, columns) for pays in decided for rows, columns in pairs), *steps)


def specialise(fusion: Fusion, input_class: InputClass) -> frozenset[int]:
    """Gives every tensor input of `fusion` the memory layout of the inputs in `input_class`. (The
    inputs of one class have equal layouts, and share one compiled program.) The fusion is changed
    in place.

    Returns the numbers (ids) of the axes that have stride 0 in the inputs of this class. Memory has
    only one element along such an axis.
    """
    repeated: set[int] = set()
    known = zip(fusion.inputs, input_class.layouts, input_class.repeated, strict=True)
    for value, layout, positions in known:
        if isinstance(value, TensorView) and layout is not None:
            value.domain = with_layout(value.domain, layout)
            repeated.update(value.domain.no_reductions[p].number for p in positions)
    return frozenset(repeated)


# ------------------------------------------------------------------ sizes that nobody chose
def default_size(program: HostIrContainer) -> int:
    """Returns a value for a size that the user of a command line tool did not choose. The value is
    at least 8, and divisible by the number of ranks of every mesh, so that devices can split every
    axis equally.
    """
    meshes = {tv.mesh for tv in program.tensors() if tv.mesh is not None}
    unit = math.lcm(*(mesh.size for mesh in meshes))
    return -(-SMALLEST_SIZE // unit) * unit


def size_symbols(program: HostIrContainer) -> tuple[str, ...]:
    """Returns the names of the sizes that a user can choose for a program: integer symbols in the
    shapes of inputs, and integer inputs."""
    found: dict[str, None] = {}
    for value in program.inputs:
        scalars = value.shape() if isinstance(value, TensorView) else [value]
        for x in scalars:
            symbols = sc.symbols(program.values.canonical(x))
            found.update((s.name, None) for s in symbols if category(s.dtype) == "int")
    return tuple(found)


def symbol_values(program: HostIrContainer, sizes: Mapping[str, int]) -> dict[Symbol, Number]:
    """Returns a value for every symbol that the program's inputs define. A symbol in `sizes` has
    the value there; any other symbol has a default.

    The default for an axis that has exactly one element per device is the number of devices. The
    default for any other size is `default_size`. A floating-point symbol, which is no size, is
    always 1.5. Raises `InputError` if `sizes` contains a name that is no size of an input.
    """
    known = size_symbols(program)
    for name in sizes:
        if name not in known:
            sizes_text = ", ".join(known) or "none, because all sizes are fixed"
            raise InputError(
                f"no input of the program has a size named {name!r} (the sizes: {sizes_text})"
            )
    default, values = default_size(program), dict[Symbol, Number]()
    devices, canonical = whole_axis_sizes(program.tensors()), program.values.canonical
    for value in program.inputs:
        for x in value.shape() if isinstance(value, TensorView) else [value]:
            for s in (*sc.symbols(x), *sc.symbols(canonical(x))):
                usual = devices.get(canonical(s), default)
                values[s] = 1.5 if is_inexact(s.dtype) else sizes.get(s.name, usual)
    return values
