"""An output that only names elements of an input is a view of the caller's tensor.

Random chains of view ops have the values, addresses and strides of torch's views. Outputs that need
other memory are excepted: views of inputs that are updated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import multidevice
from fuser import FusionDefinition, ParallelType
from multidevice import DeviceMesh
from tests.fuser.ir.test_memory_layout import strided

pytestmark = pytest.mark.from_text

PROGRAMS, BATCH = 180, 60
MESH = DeviceMesh([0, 1])


@dataclass(frozen=True)
class Step:
    """One view op: its name, its arguments, and the same op in torch."""

    op: str
    args: Sequence[Any]
    torch: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Chain:
    """A tensor and successive views of it; `units` marks the last one's broadcast axes."""

    rng: random.Random
    latest: torch.Tensor
    units: list[bool]
    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step, units: list[bool]) -> None:
        self.steps.append(step)
        self.latest, self.units = step.torch(self.latest), units

    def permute(self) -> None:
        order = list(range(self.latest.dim()))
        self.rng.shuffle(order)
        if order:
            self.add(
                Step("permute", [order], lambda x: x.permute(order)),
                [self.units[p] for p in order],
            )

    def reshape(self) -> None:
        rng, shape = self.rng, list(self.latest.shape)
        way = rng.random()
        if way < 0.4 and shape:
            at = rng.randrange(len(shape))
            shape[at : at + 1] = self._factors(shape[at], rng.randint(1, 3))
        elif way < 0.75 and len(shape) > 1:
            at = rng.randrange(len(shape) - 1)
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            shape = self._factors(self.latest.numel(), rng.randint(1, 4))
        if len(shape) < 7:
            # An axis of one element may have been merged with any other axis.
            is_known = all(u for n, u in zip(self.latest.shape, self.units, strict=True) if n == 1)
            units = [n == 1 and is_known for n in shape]
            self.add(Step("reshape", [shape], lambda x: x.reshape(shape)), units)

    def slice(self) -> None:
        wide = [k for k, n in enumerate(self.latest.shape) if n > 1]
        if not wide:
            return
        # A slice of all is a `set`, a copy.
        sliced = {k: self._part(k) for k in self.rng.sample(wide, self.rng.randint(1, len(wide)))}
        ends = [sliced.get(k, (0, n)) for k, n in enumerate(self.latest.shape)]
        starts, stops = ([pair[k] for pair in ends] for k in range(2))
        parts = tuple(slice(*pair) for pair in ends)
        self.add(Step("slice", [starts, stops], lambda x: x[parts]), list(self.units))

    def _part(self, axis: int) -> tuple[int, int]:
        n = int(self.latest.shape[axis])
        start = self.rng.randrange(n)
        stop = self.rng.randint(start + 1, n)
        return (start, stop) if stop - start < n else (0, n - 1)

    def broadcast(self) -> None:
        at = self.rng.randint(0, self.latest.dim())
        flags = [k == at for k in range(self.latest.dim() + 1)]
        units = [*self.units[:at], True, *self.units[at:]]
        self.add(Step("broadcast", [flags], lambda x: x.unsqueeze(at)), units)

    def expand(self) -> None:
        axes = [k for k, n in enumerate(self.latest.shape) if n == 1 and self.units[k]]
        if axes:
            axis = self.rng.choice(axes)
            sizes = [3 if k == axis else -1 for k in range(self.latest.dim())]
            units = [u and k != axis for k, u in enumerate(self.units)]
            self.add(Step("expand", [sizes], lambda x: x.expand(sizes)), units)

    def squeeze(self) -> None:
        axes = [k for k, n in enumerate(self.latest.shape) if n == 1 and self.units[k]]
        if axes:
            axis = self.rng.choice(axes)
            units = [u for k, u in enumerate(self.units) if k != axis]
            self.add(Step("squeeze", [[axis]], lambda x: x.squeeze(axis)), units)

    def _factors(self, n: int, count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count - 1):
            found.append(self.rng.choice([d for d in range(1, n + 1) if n % d == 0]))
            n //= found[-1]
        found.append(n)
        self.rng.shuffle(found)
        return found


MAKERS = (
    Chain.permute,
    Chain.reshape,
    Chain.reshape,
    Chain.slice,
    Chain.broadcast,
    Chain.expand,
    Chain.squeeze,
)


def random_input(rng: random.Random) -> tuple[list[int], list[int], int]:
    """Returns (shape, strides, offset): any order, gaps, stride 0, size 1 with any stride."""
    rank = rng.randint(1, 4)
    shape = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rank)]
    order = list(range(rank))
    if rng.random() < 0.5:
        rng.shuffle(order)
    strides, step = [0] * rank, rng.choice((1, 1, 1, 2))
    for p in reversed(order):
        if rng.random() < 0.1:
            continue
        strides[p] = step
        if shape[p] == 1 and rng.random() < 0.4:
            strides[p] = rng.choice((0, 1, 977))
            continue
        step = step * shape[p] + (rng.randint(1, 3) if rng.random() < 0.12 else 0)
    return shape, strides, rng.choice((0, 0, 1, 3))


def views(x: torch.Tensor, steps: Sequence[Step]) -> list[torch.Tensor]:
    found = [x]
    for step in steps:
        found.append(step.torch(found[-1]))
    return found


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_place(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor, what: object) -> None:
    """Checks that a result is a view if torch has one, with its address and strides."""
    assert share(found, x) == share(wanted, x), what
    if share(wanted, x):
        assert found.data_ptr() == wanted.data_ptr(), what
        pairs = zip(found.shape, found.stride(), wanted.stride(), strict=True)
        assert all(n == 1 or mine == other for n, mine, other in pairs), what


@pytest.mark.parametrize("batch", range(PROGRAMS // BATCH))
def test_views_are_those_of_torch(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        check_chain(seed)


def check_chain(seed: int) -> None:
    rng = random.Random(seed)
    shape, strides, offset = random_input(rng)
    x, other = (strided(shape, strides, offset, seed=k) for k in range(2))
    is_static = rng.random() < 0.5
    declared = [n if is_static or n == 1 else -1 for n in shape]
    chain = Chain(rng, x, [n == 1 for n in declared])
    for _ in range(rng.randint(1, 4)):
        rng.choice(MAKERS)(chain)
    if not chain.steps:
        return
    chosen = sorted({len(chain.steps), rng.randint(1, len(chain.steps))})
    is_read = rng.random() < 0.3
    repeats = any(n > 1 and not step for n, step in zip(shape, strides, strict=True))
    is_updated = not repeats and rng.random() < 0.3
    with FusionDefinition() as fd:
        tvs = [fd.define_tensor(declared)]
        for step in chain.steps:
            tvs.append(getattr(fd.ops, step.op)(tvs[-1], *step.args))
        for k in chosen:
            fd.add_output(tvs[k])
        if is_read:
            fd.add_output(fd.ops.neg(tvs[-1]))
        if is_updated:
            fd.add_output(fd.ops.add(tvs[0], 1.0), tvs[0])
    text = (seed, shape, strides, offset, declared, [(s.op, s.args) for s in chain.steps])
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    # The first run of a class is interpreted; later ones are replayed, also on another tensor.
    for call, given in enumerate((x, x, other, x, other)):
        wanted = views(given, chain.steps)
        old = [w.clone() for w in wanted]
        before = given.clone()
        outs = fd.execute([given])
        for k, found in zip(chosen, outs, strict=False):
            what = (*text, f"call {call}, result {k}", wanted[k].stride(), found.stride())
            assert torch.equal(found, old[k]), what
            if is_updated:
                assert not share(found, given), what
                kept.append((found, old[k]))
            else:
                check_place(found, wanted[k], given, what)
        if is_read:
            assert torch.equal(outs[-1], -old[-1]), text
            kept.append((outs[-1], -old[-1]))
        assert torch.equal(given, before + 1 if is_updated else before), text
    # No later run has overwritten results that the caller still holds.
    for found, value in kept:
        assert torch.equal(found, value), text


# Name -> (definition on x [4, 6, 8], torch function on a shard, sharded axis of x).
SHARDED: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor], int]] = {
    "permute": (lambda fd, x: fd.ops.permute(x, [2, 0, 1]), lambda x: x.permute(2, 0, 1), 0),
    "merge": (lambda fd, x: fd.ops.reshape(x, [4, 48]), lambda x: x.reshape(-1, 48), 0),
    "merge the cut axis": (lambda fd, x: fd.ops.reshape(x, [24, 8]), lambda x: x.reshape(-1, 8), 0),
    "split": (lambda fd, x: fd.ops.reshape(x, [4, 6, 2, 4]), lambda x: x.reshape(-1, 6, 2, 4), 0),
    "split the cut axis": (
        lambda fd, x: fd.ops.reshape(x, [4, 2, 3, 8]),
        lambda x: x.reshape(4, 1, 3, 8),
        1,
    ),
    "slice": (lambda fd, x: fd.ops.slice(x, [0, 1, 2], [4, 5, 8]), lambda x: x[:, 1:5, 2:], 0),
    "broadcast": (
        lambda fd, x: fd.ops.broadcast(x, [False, True, False, False]),
        lambda x: x.unsqueeze(1),
        0,
    ),
    "chain": (
        lambda fd, x: fd.ops.permute(fd.ops.reshape(x, [4, 3, 2, 8]), [1, 0, 3, 2]),
        lambda x: x.reshape(-1, 3, 2, 8).permute(1, 0, 3, 2),
        0,
    ),
}


@pytest.mark.parametrize("case", SHARDED)
def test_a_shard_is_viewed_as_the_whole_is(case: str) -> None:
    """Each rank returns a view of its own shard; the shards may have different gaps."""
    build, reference, axis = SHARDED[case]
    shape = [2 if k == axis else n for k, n in enumerate((4, 6, 8))] if axis == 0 else [4, 3, 8]

    def body(gaps: tuple[int, int]) -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 6, 8])
            fd.add_output(build(fd, x))
            x.set_device_mesh(MESH)
            x.outer_split(axis, 2)
            x.axis(axis).parallelize(ParallelType.mesh_x)
        strides = [shape[1] * 8 + gaps[rank], 8, 1]
        for seed in range(3):
            mine = strided(shape, strides, rank, seed=seed)
            (found,) = fd.execute([mine])
            wanted = reference(mine)
            assert torch.equal(found, wanted)
            check_place(found, wanted, mine, (rank, gaps, wanted.stride(), found.stride()))

    for gaps in ((0, 0), (0, 3), (5, 5)):
        with multidevice.simulate(2) as world:
            world.run(lambda gaps=gaps: body(gaps))


def transposed() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.permute(x, [1, 0]))
        fd.add_output(fd.ops.neg(x))
    return fd


@pytest.mark.filterwarnings("ignore:input 0")
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_view_carries_no_gradient(kind: type[torch.Tensor]) -> None:
    """torch's own view of a leaf would require a gradient although none is recorded."""
    fd, x = transposed(), torch.randn(3, 4, requires_grad=True)
    given = x if kind is torch.Tensor else torch.nn.Parameter(x.detach())
    for _ in range(3):
        view, negative = fd.execute([given])
        assert view.data_ptr() == given.data_ptr()
        assert not view.requires_grad and not negative.requires_grad


def test_what_is_a_lazy_view_is_computed_first() -> None:
    fd, z = transposed(), torch.randn(3, 4, dtype=torch.complex64)
    for _ in range(3):
        view, negative = fd.execute([z.conj().imag])
        assert torch.equal(view, -z.imag.t()) and not view.is_neg()
        assert torch.equal(negative, z.imag)
