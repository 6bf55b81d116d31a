"""Random fusions on one device: every op, rank, layout, dtype and kind of extent, in set
proportions.
"""

from __future__ import annotations

from collections.abc import Callable

from tools.fuzz import views
from tools.fuzz.builder import Seed
from tools.fuzz.fusions import FusionBuilder
from tools.fuzz.program import Output, Program, Ref


def generate(seed: Seed) -> Program:
    """Returns the program of a seed, or the next one of a source of random numbers."""
    return _Single(seed).build()


class _Single(FusionBuilder):
    def build(self) -> Program:
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3))):
            self.input()
        if self.chance(0.25):
            self.scalar_input()
        target = min(24, 1 + int(self.rng.expovariate(1 / 6)))
        for _ in range(target * 4):
            if len(self.stmts) >= target:
                break
            self.rng.choices(_MAKERS, _WEIGHTS)[0](self)
        if all(name not in self.dims for s in self.stmts for name in s.outs):
            name = self.pick()
            assert name is not None
            self.emit("set", [Ref(name)], self.dims[name], careful=False)
        return self.program(self.choose_outputs())

    # ------------------------------------------------------------ the end
    def choose_outputs(self) -> list[Output]:
        made = [n for s in self.stmts for n in s.outs if n in self.dims]
        leaves = [n for n in made if not self.uses[n]]
        chosen = self.rng.sample(leaves, min(len(leaves), 4)) if leaves else [made[-1]]
        while len(chosen) < 4 and self.chance(0.25):
            chosen.append(self.rng.choice(made))
        if self.chance(0.06):
            chosen.append(self.rng.choice([n for n in self.dims if n.startswith("x")]))
        if not self.chance(0.15):
            chosen = list(dict.fromkeys(chosen))
        outputs = [Output(n) for n in chosen]
        return self.with_aliases(outputs) if self.chance(0.3) else outputs

    def with_aliases(self, outputs: list[Output]) -> list[Output]:
        taken: set[str] = {o.name for o in outputs if o.name.startswith("x")}
        for k, out in enumerate(outputs):
            if out.name.startswith("x") or sum(o.name == out.name for o in outputs) > 1:
                continue
            targets = [
                i.name
                for i in self.inputs
                if i.name in self.dims
                and i.name not in taken
                and self.dtype[i.name] == self.dtype[out.name]
                and [d.vec for d in self.dims[i.name]] == [d.vec for d in self.dims[out.name]]
                and i.layout.is_writable  # pyright: ignore[reportAttributeAccessIssue]
            ]
            if targets:
                outputs[k] = Output(out.name, self.rng.choice(targets))
                taken.add(outputs[k].alias or "")
        return outputs


_TABLE: tuple[tuple[Callable[[FusionBuilder], None], int], ...] = (
    (FusionBuilder.unary, 20),
    (FusionBuilder.binary, 24),
    (FusionBuilder.ternary, 7),
    (FusionBuilder.cast, 5),
    (FusionBuilder.copy, 2),
    (FusionBuilder.scalar_arithmetic, 5),
    (FusionBuilder.reduction, 14),
    (FusionBuilder.moments, 4),
    (FusionBuilder.norm, 3),
    (views.broadcast, 3),
    (views.broadcast_in_dim, 4),
    (views.expand, 3),
    (views.squeeze, 3),
    (views.permute, 7),
    (views.reshape, 8),
    (views.slice, 6),
    (views.pad, 4),
    (views.cat, 4),
    (views.factory, 4),
    (views.contraction, 4),
    (views.attend, 3),
    (views.product, 6),
    (views.composite, 10),
    (views.look_up, 12),
    (views.scan_or_sort, 6),
)
_MAKERS = [m for m, _ in _TABLE]
_WEIGHTS = [w for _, w in _TABLE]
