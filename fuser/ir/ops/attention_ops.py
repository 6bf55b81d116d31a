"""Scaled dot product attention and its gradient, as ops that torch executes.

In docstrings and code, every axis has a letter:

- n: batch. More batch axes may precede n.
- h: heads. With `enable_gqa`, keys and values have fewer heads, with letter g. Then h / g
  consecutive heads of queries read one head of keys. If h is split over devices, g is split with
  it.
- l: queries; s: keys.
- e: features of a query and a key; v: features of a value.
- p: the words of a random seed.

Batches and heads are independent of each other, so these axes may be split over devices. No other
axis may be split, because an element of a result needs all elements along it.

Source: Vaswani et al. 2017, section 3.2; Dao 2023 (FlashAttention-2) for the tensors that the
gradient needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import AxisMap, TensorOp, Variant
from fuser.ir.op import attr, operand, result
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.support.errors import VerifyError, counted

if TYPE_CHECKING:
    from fuser.ir.fusion import TensorView

__all__ = ["AttentionOp", "SdpaBwdOp", "SdpaFwdOp", "TensorOp"]


class AttentionOp(LibraryOp):
    """Base class of the attention op and of its gradient op.

    Every axis has a letter, such as n for batches and h for heads (see the module). `AXES` has the
    letters of each tensor's axes. `DTYPES` lists the tensors whose dtype differs from the dtype of
    `query`.
    """

    RUNS_IN_STEPS: ClassVar[bool] = False
    TAKES_EMPTY: ClassVar[bool] = True
    TAKES_ANY_BATCHES: ClassVar[bool] = True
    MAKES_RESULTS: ClassVar[bool] = True
    # Equal queries still have separate positions and separate dropped elements.
    KEEPS_EXPANDED: ClassVar[bool] = False
    # Letters of the batch axes in front of n; the last letter is the axis next to n.
    LEADING: ClassVar[str] = "ZYXWVUTSRQPONMLKJIHGFEDCBA"
    AXES: ClassVar[dict[str, str]] = {}
    # Result -> the operand whose memory order it has.
    FOLLOWED: ClassVar[dict[str, str]] = {}
    # Operands that may have one element along an axis, which is broadcast.
    REPEATED: ClassVar[tuple[str, ...]] = ()
    DTYPES: ClassVar[dict[str, tuple[DataType, ...]]] = {
        "log_sumexp": (DataType.Float,),
        "philox_seed": (DataType.UInt64,),
        "philox_offset": (DataType.UInt64,),
    }

    def tensors(self) -> Iterator[tuple[str, TensorView]]:
        """Yields (field name, tensor) for all fields that have a tensor.

        Operands that may be broadcast come first, then the other operands, then the results.
        """
        others = (f for f in self.fields_of("operand") if f not in self.REPEATED)
        for field in (*self.REPEATED, *others, *self.fields_of("result")):
            value = getattr(self, field)
            if field in self.AXES and value is not None:
                yield field, value

    @classmethod
    def own_letters(cls, field: str, *, enable_gqa: bool) -> str:
        """Returns the letters of the axes that tensor `field` must have, without extra batches.

        Each axis has a letter, such as n for batches and h for heads. With `enable_gqa`, the heads
        of keys and values have the letter g, because there are fewer of them.
        """
        letters = cls.AXES[field]
        return letters.replace("h", "g") if enable_gqa and letters.startswith("nhs") else letters

    def letters(self, field: str) -> str:
        """Returns one letter per axis of the tensor in field `field`, such as "nhle" for queries.

        Reduction axes have no letter. Axes with equal letters in two tensors correspond.
        """
        own = self.own_letters(field, enable_gqa=self._value("enable_gqa"))
        more = self._value("query").ndim - len(self.AXES["query"]) if "n" in own else 0
        return self.LEADING[len(self.LEADING) - max(more, 0) :] + own

    def result_letters(self, out: TensorView) -> str:
        """Returns one letter per axis of the result `out`, such as n for batches.

        Axes of two tensors with equal letters correspond.
        """
        field = next(f for f in self.fields_of("result") if getattr(self, f) is out)
        return self.letters(field)

    def operand_letters(self, operand_index: int) -> str:
        """Returns one letter per axis of operand `operand_index`, such as n for batches.

        Axes of two tensors with equal letters correspond.
        """
        given = [f for f in self.fields_of("operand") if getattr(self, f) is not None]
        return self.letters(given[operand_index])

    def followed_by(self, out: TensorView) -> TensorView | None:
        """Returns the operand that determines the order of the axes of the result `out` in memory.

        Both have the same order. Returns None if no operand determines it, because `out` is
        row-major.
        """
        followed = (f for field, f in self.FOLLOWED.items() if self._value(field) is out)
        return next(map(self._value, followed), None)

    @property
    def draws(self) -> bool:
        """Whether dropout may drop elements at random: dropout_p is not the constant 0."""
        dropped = self._value("dropout_p")
        return not (isinstance(dropped, Const) and dropped.value == 0)

    @property
    def is_always_causal(self) -> bool:
        """Whether is_causal is the constant True."""
        causal = self._value("is_causal")
        return isinstance(causal, Const) and bool(causal.value)

    @property
    def dropout_text(self) -> str:
        """The dropout probability as text, for messages."""
        return str(self._value("dropout_p"))

    def _value(self, field: str) -> Any:
        """Returns the value of a field by its name, such as `query`.

        The subclasses declare the fields, so this base class has no attributes for them.
        """
        return getattr(self, field)

    # ------------------------------------------------------------ axes
    def axis_map(self, operand_index: int) -> AxisMap:
        """Returns, per axis of the first result, the corresponding operand axis, or None.

        The operand is `inputs[operand_index]`. Batches correspond to batches, heads to heads, etc.
        """
        return self.axis_map_to(operand_index, self.out_tensor)

    def axis_map_to(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of the result `out`, the corresponding operand axis, or None.

        The operand is `inputs[operand_index]`. Batches correspond to batches, heads to heads, etc.
        """
        mine = self.operand_letters(operand_index)
        return tuple(mine.index(c) if c in mine else None for c in self.result_letters(out))

    def alike_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices must split in the same way.

        The entry is None if there is no such axis. The heads of queries and the fewer heads of keys
        are such a pair, although their sizes differ: a device needs the heads of keys that its
        heads of queries read.
        """
        mine = _cut_letters(self.operand_letters(operand_index))
        letters = _cut_letters(self.result_letters(out))
        return tuple(mine.index(c) if c in mine else None for c in letters)

    def cut_map(self, operand_index: int, out: TensorView) -> AxisMap:
        """Returns, per axis of `out`, the operand axis that devices may split together with it.

        Only batches and heads may be split. All other entries are None.
        """
        whole = self.whole_axes(out)
        found = enumerate(self.alike_map(operand_index, out))
        return tuple(None if k in whole else position for k, position in found)

    def parallel_axes(self, out: TensorView, sibling: TensorView) -> Iterator[tuple[int, int]]:
        """Yields pairs of corresponding axes of two results of the op.

        Each pair is (position in `out`, position in `sibling`). Axes correspond if both are
        batches, both are heads, etc.
        """
        theirs = self.result_letters(sibling)
        for k, c in enumerate(self.result_letters(out)):
            if c in theirs:
                yield k, theirs.index(c)

    def parallel_cuts(self, out: TensorView, sibling: TensorView) -> Iterator[tuple[int, int]]:
        """Yields pairs of axes of two results that devices must split in the same way.

        Each pair is (position in `out`, position in `sibling`). The heads of queries and the fewer
        heads of keys are such a pair.
        """
        theirs = _cut_letters(self.result_letters(sibling))
        for k, c in enumerate(_cut_letters(self.result_letters(out))):
            # A single head of keys, which all heads of queries read, cannot be sharded.
            if c in theirs and not sibling.domain.logical[theirs.index(c)].is_broadcast:
                yield k, theirs.index(c)

    def whole_axes(self, out: TensorView) -> tuple[int, ...]:
        """Returns the axes of `out` that must not be split over devices.

        These are all axes except batches and heads, because an element of a result needs all
        elements along such an axis.
        """
        return tuple(k for k, c in enumerate(self.result_letters(out)) if self.is_whole(c))

    def whole_operand_axes(self, operand_index: int) -> tuple[int, ...]:
        """Returns the axes of operand `operand_index` that must not be split over devices.

        These are all axes except batches and heads, because an element of a result needs all
        elements along such an axis.
        """
        letters = self.operand_letters(operand_index)
        return tuple(k for k, c in enumerate(letters) if self.is_whole(c))

    @staticmethod
    def is_whole(letter: str) -> bool:
        """Returns whether the axis with this letter must not be split over devices.

        This holds for all axes except batches and heads, because one element of a result needs all
        elements along such an axis.
        """
        return letter.islower() and letter not in "nhg"

    def verify(self) -> None:
        """Checks that each operand is a tensor or a scalar as declared, and checks axes and dtypes.

        Raises:
            VerifyError: a check fails.
        """
        for field in self.fields_of("operand"):
            value = getattr(self, field)
            if value is not None and isinstance(value, Scalar) == (field in self.AXES):
                kind = "tensor" if field in self.AXES else "scalar"
                raise VerifyError(f"{self.name}: {field} must be a {kind}, but it is {value}")
        for field, tv in self.tensors():
            letters = self.letters(field)
            if tv.ndim != len(letters):
                raise VerifyError(
                    f"{self.name}: {field} must have the {len(letters)} axes "
                    f"[{', '.join(letters)}], but {tv} has {counted(tv.ndim, 'axis')}"
                )
            known = self.DTYPES.get(field, (self._value("query").dtype(),))
            if tv.dtype() not in known:
                raise VerifyError(
                    f"{self.name}: {field} must have the dtype "
                    f"{' or '.join(map(dtype_text, known))}, but {tv} is {dtype_text(tv.dtype())}"
                )


def _cut_letters(letters: str) -> str:
    """Returns the letters of axes, with g (heads of keys) replaced by h (heads of queries).

    Axes with equal letters are split over devices together. Heads of keys and heads of queries need
    equal letters, because each device needs the heads of keys that its heads of queries read.
    """
    return letters.replace("g", "h")


_FLOATS = (DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double)


class SdpaFwdOp(AttentionOp):
    """Attention: out = dropout(softmax(query @ key.T * scale + bias)) @ value, per batch and head.

    - bias is added to the scores (query @ key.T * scale). mask (Bool) is False for the scores that
      are ignored. Both are broadcast to [n, h, l, s]: batches, heads, queries, keys.
    - If is_causal is True, a query ignores the keys after its own position.
    - For a query that ignores all scores, the result is 0.
    - scale defaults to 1/sqrt(number of features of a query).
    - log_sumexp is the log-sum-exp of the scores of each query. philox_seed and philox_offset
      identify the elements that dropout dropped. The gradient op needs all three results.
    """

    out: TensorView = result()
    log_sumexp: TensorView = result()
    philox_seed: TensorView = result()
    philox_offset: TensorView = result()
    query: TensorView = operand()
    key: TensorView = operand()
    value: TensorView = operand()
    bias: TensorView | None = operand()
    mask: TensorView | None = operand()
    dropout_p: Scalar = operand()
    is_causal: Scalar = operand()
    scale: Scalar | None = operand()
    enable_gqa: bool = attr(default=False)
    AXES: ClassVar[dict[str, str]] = {
        "out": "nhlv",
        "log_sumexp": "nhl",
        "philox_seed": "p",
        "philox_offset": "",
        "query": "nhle",
        "key": "nhse",
        "value": "nhsv",
        "bias": "nhls",
        "mask": "nhls",
    }
    FOLLOWED: ClassVar[dict[str, str]] = {"out": "query"}
    REPEATED: ClassVar[tuple[str, ...]] = ("bias", "mask")
    DTYPES: ClassVar[dict[str, tuple[DataType, ...]]] = {
        **AttentionOp.DTYPES,
        "bias": _FLOATS,
        "mask": (DataType.Bool,),
    }

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `sdpfa_fwd`."""
        return "sdpfa_fwd"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        has = (v is not None for v in (self.bias, self.mask, self.scale))
        return _forward(*has, enable_gqa=self.enable_gqa)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for *has, grouped in itertools.product((False, True), repeat=4):
            named = zip(("bias", "mask", "scale"), has, strict=True)
            absent = {f: None for f, given in named if not given}
            yield {**absent, "enable_gqa": grouped}, _forward(*has, enable_gqa=grouped)


class SdpaBwdOp(AttentionOp):
    """The gradients of query, key and value, computed from `grad_output`, the gradient of out.

    The attention op must have neither bias nor mask. `attended` is its result `out`. log_sumexp,
    philox_seed and philox_offset are its other results.
    """

    grad_query: TensorView = result()
    grad_key: TensorView = result()
    grad_value: TensorView = result()
    grad_output: TensorView = operand()
    query: TensorView = operand()
    key: TensorView = operand()
    value: TensorView = operand()
    attended: TensorView = operand()
    log_sumexp: TensorView = operand()
    dropout_p: Scalar = operand()
    is_causal: Scalar = operand()
    philox_seed: TensorView = operand()
    philox_offset: TensorView = operand()
    scale: Scalar | None = operand()
    enable_gqa: bool = attr(default=False)
    AXES: ClassVar[dict[str, str]] = {
        "grad_query": "nhle",
        "grad_key": "nhse",
        "grad_value": "nhsv",
        "grad_output": "nhlv",
        "query": "nhle",
        "key": "nhse",
        "value": "nhsv",
        "attended": "nhlv",
        "log_sumexp": "nhl",
        "philox_seed": "p",
        "philox_offset": "",
    }
    FOLLOWED: ClassVar[dict[str, str]] = {
        f"grad_{operand}": operand for operand in ("query", "key", "value")
    }

    @property
    def name(self) -> str:
        """The name of the op in messages and dumps: `sdpfa_bwd`."""
        return "sdpfa_bwd"

    def template(self) -> str:
        """Returns the text form of this op, with placeholders such as `{out}` for its fields."""
        return _backward(self.scale is not None, enable_gqa=self.enable_gqa)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, template) for each text form that ops of this class can have.

        A template is the text of an op, with placeholders such as `{out}` for its fields. If a text
        matches a template, the parser creates an op with the attribute values of this pair. Of
        several templates that match, the first is taken.
        """
        for scale, grouped in itertools.product((True, False), (False, True)):
            absent = {} if scale else {"scale": None}
            yield {**absent, "enable_gqa": grouped}, _backward(scale, enable_gqa=grouped)


def _text(results: tuple[str, ...], call: str, operands: list[str]) -> str:
    left = ",\n".join(f"{{{name}}}" for name in results)
    right = ",\n          ".join(operands)
    return f"{left}\n   = {call}({right}\n  )"


_GROUPED = "enable_gqa = true"


def _forward(bias: bool, mask: bool, scale: bool, *, enable_gqa: bool) -> str:
    named = [*["bias"] * bias, *["mask"] * mask, "dropout_p", "is_causal", *["scale"] * scale]
    operands = ["{query}", "{key}", "{value}", *(f"{name} = {{{name}}}" for name in named)]
    results = ("out", "log_sumexp", "philox_seed", "philox_offset")
    return _text(results, "sdpa", [*operands, *[_GROUPED] * enable_gqa])


def _backward(scale: bool, *, enable_gqa: bool) -> str:
    named = {"logsum_exp": "log_sumexp", "dropout_p": "dropout_p", "is_causal": "is_causal"}
    named |= {"philox_seed": "philox_seed", "philox_offset": "philox_offset"}
    named |= {"scale": "scale"} if scale else {}
    return _text(
        ("grad_query", "grad_key", "grad_value"),
        "sdpa_bwd",
        [
            *(f"{{{name}}}" for name in ("grad_output", "query", "key", "value", "attended")),
            *(f"{text} = {{{name}}}" for text, name in named.items()),
            *[_GROUPED] * enable_gqa,
        ],
    )
