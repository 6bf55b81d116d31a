"""Op functions for attention, which check shapes and dtypes.

The formulas are in `fuser.ir.ops.attention_ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, category, dtype_text, is_floating
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.attention_ops import AttentionOp, SdpaBwdOp, SdpaFwdOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ops.building import add_op, as_operand, axes_of, fail, join_axes, mesh_of, unexpanded
from fuser.support.errors import DefinitionError, DtypeError, counted

D = DataType
_RANK = 4


def sdpfa_fwd(
    query: TensorView,
    key: TensorView,
    value: TensorView,
    bias: TensorView | None = None,
    mask: TensorView | None = None,
    dropout_p: ScalarLike | None = None,
    is_causal: ScalarLike | None = None,
    scale: ScalarLike | None = None,
    enable_gqa: bool = False,
) -> tuple[TensorView, TensorView, TensorView, TensorView]:
    """Computes scaled dot product attention: softmax(query @ key.T * scale + bias) @ value.

    query [.., N, H, L, E], key [.., N, H, S, E] and value [.., N, H, S, Ev] -> (output [.., N, H,
    L, Ev], log_sumexp [.., N, H, L] Float, philox_seed [2] UInt64, philox_offset [] UInt64).

    - `bias` (floating) is added to the scores. `mask` is Bool; where it is False, the score is
      ignored. Both have as many axes as query, and are broadcast to [.., N, H, L, S].
    - The default of `dropout_p` is 0.0, of `is_causal` False, and of `scale` 1/sqrt(E).
    - With `is_causal`, query i attends only to the keys 0 to i.
    - With `enable_gqa`, key and value have G heads, and G divides H. Each head of key and value is
      read by H / G consecutive heads of query.

    Raises:
        DefinitionError: a rank, a size or `dropout_p` is wrong.
        DtypeError: a dtype is wrong.
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    numbers = _numbers("sdpfa_fwd", dropout_p, is_causal, scale)
    axes = _Axes("sdpfa_fwd", SdpaFwdOp, given, enable_gqa=enable_gqa)
    results = map(axes.result, ("out", "log_sumexp", "philox_seed", "philox_offset"))
    out, log_sumexp, seed, offset = results
    read = query, key, value, bias, mask
    add_op(SdpaFwdOp(out, log_sumexp, seed, offset, *read, *numbers, enable_gqa=enable_gqa))
    return out, log_sumexp, seed, offset


def sdpfa_bwd(
    grad_output: TensorView,
    query: TensorView,
    key: TensorView,
    value: TensorView,
    output: TensorView,
    logsumexp: TensorView,
    dropout_p: ScalarLike | None,
    is_causal: ScalarLike | None,
    philox_seed: TensorView,
    philox_offset: TensorView,
    scale: ScalarLike | None,
    enable_gqa: bool = False,
) -> tuple[TensorView, TensorView, TensorView]:
    """Computes the gradients of query, key and value of an `sdpfa_fwd` without bias and mask.

    `grad_output` is the gradient of the output. The other arguments are the operands and the
    results of that `sdpfa_fwd` call, and the arguments that the call had.

    Raises:
        DefinitionError: a rank, a size or `dropout_p` is wrong.
        DtypeError: a dtype is wrong.
    """
    given = {
        "query": query,
        "key": key,
        "value": value,
        "grad_output": grad_output,
        "attended": output,
        "log_sumexp": logsumexp,
        "philox_seed": philox_seed,
        "philox_offset": philox_offset,
    }
    dropped, causal, factor = _numbers("sdpfa_bwd", dropout_p, is_causal, scale)
    axes = _Axes("sdpfa_bwd", SdpaBwdOp, given, enable_gqa=enable_gqa)
    grads = map(axes.result, ("grad_query", "grad_key", "grad_value"))
    grad_query, grad_key, grad_value = grads
    read = grad_output, query, key, value, output, logsumexp
    kept = dropped, causal, philox_seed, philox_offset, factor
    add_op(SdpaBwdOp(grad_query, grad_key, grad_value, *read, *kept, enable_gqa=enable_gqa))
    return grad_query, grad_key, grad_value


# ------------------------------------------------------------------ numbers
def _numbers(
    name: str,
    dropout_p: ScalarLike | None,
    is_causal: ScalarLike | None,
    scale: ScalarLike | None,
) -> tuple[Scalar, Scalar, Scalar | None]:
    dropped = _real(name, "dropout_p", 0.0 if dropout_p is None else dropout_p)
    if isinstance(dropped, Const) and not 0 <= dropped.value < 1:
        raise fail(name, f"dropout_p must be at least 0 and below 1, got {dropped.value}")
    causal = as_operand(False if is_causal is None else is_causal, name)
    if causal.dtype is not D.Bool:
        raise DtypeError(
            f"{name}: is_causal must be Bool, but {causal} is {dtype_text(causal.dtype)}"
        )
    return dropped, causal, None if scale is None else _real(name, "scale", scale)


def _real(name: str, what: str, value: ScalarLike) -> Scalar:
    number = as_operand(value, name)
    if category(number.dtype) not in ("int", "float"):
        raise DtypeError(
            f"{name}: {what} must be a real number, but its dtype is {dtype_text(number.dtype)}"
        )
    return sc.cast(number, D.Double)


# ------------------------------------------------------------------ axes
class _Axes:
    """The axes of the operands and results of an attention op, by letter: N (batch), H (heads), L
    (queries), S (keys), E and so on.

    Axes of several operands with the same letter must have the same size. They become one axis of
    the result.
    """

    def __init__(
        self,
        name: str,
        op: type[AttentionOp],
        given: Mapping[str, TensorView | None],
        *,
        enable_gqa: bool,
    ) -> None:
        self._name, self._op, self._is_grouped = name, op, enable_gqa
        self._given = {field: tv for field, tv in given.items() if tv is not None}
        rank = self._given["query"].ndim
        if rank < _RANK:
            query = self._given["query"]
            raise fail(
                name,
                f"query needs at least 4 axes, [.., N, H, L, E], but {query} has "
                f"{counted(query.ndim, 'axis')}",
            )
        self._leading = op.LEADING[len(op.LEADING) - (rank - _RANK) :]
        self._check_dtypes()
        self._mapped: dict[str, list[tuple[TensorView, IterDomain]]] = {}
        for field, tv in self._given.items():
            letters = self._letters(field)
            if tv.ndim != len(letters):
                shown = ", ".join(letters.upper() if "p" not in letters else "2")
                # torch takes a mask of fewer axes.
                is_short = field in ("bias", "mask") and tv.ndim < len(letters)
                hint = f": broadcast it to {len(letters)} axes" if is_short else ""
                raise fail(
                    name,
                    f"{field} needs {len(letters)} axes [{shown}], but {tv} has "
                    f"{counted(tv.ndim, 'axis')}{hint}",
                )
            for letter, axis in zip(letters, axes_of(tv), strict=True):
                self._mapped.setdefault(letter, []).append((tv, axis))
        self._check_seed()
        for letter, mapped in self._mapped.items():
            self._check_broadcasts(letter, mapped)
        self._joined = {c: self._join(c, mapped) for c, mapped in self._mapped.items()}
        self._check_groups()

    def _letters(self, field: str) -> str:
        mine = self._op.own_letters(field, enable_gqa=self._is_grouped)
        return self._leading + mine if "n" in mine else mine

    def _join(self, letter: str, mapped: Sequence[tuple[TensorView, IterDomain]]) -> IterDomain:
        try:
            joined = join_axes(active_fusion(), mapped, self._name)
        except DefinitionError as error:
            error.args = (f"{error}{self._flag_for(letter, mapped)}",)
            raise
        return joined if self._op.KEEPS_EXPANDED else unexpanded(joined)

    def _flag_for(self, letter: str, mapped: Sequence[tuple[TensorView, IterDomain]]) -> str:
        """Returns a hint for the error about unequal sizes of an axis: to pass `enable_gqa`, if
        keys have fewer heads than queries. Returns "" in all other cases.

        `letter` is the letter of the axis, and `mapped` has a pair (operand, axis of the operand)
        for each operand that has an axis with this letter.
        """
        sizes = {id(tv): sc.int_value(axis.size) for tv, axis in mapped}
        heads, groups = (sizes.get(id(self._given[field])) for field in ("query", "key"))
        is_meant = letter == "h" and heads and groups and heads > groups and heads % groups == 0
        return (
            f": for {groups} heads of keys and {heads} of queries pass enable_gqa=True"
            if is_meant
            else ""
        )

    def _check_dtypes(self) -> None:
        query = self._given["query"]
        if not is_floating(query.dtype()):
            raise DtypeError(
                f"{self._name}: query must have a floating dtype, but {query} is "
                f"{dtype_text(query.dtype())}"
            )
        for field, tv in self._given.items():
            known = self._op.DTYPES.get(field, (query.dtype(),))
            if tv.dtype() not in known:
                expected = " or ".join(map(dtype_text, known))
                raise DtypeError(
                    f"{self._name}: {field} needs the dtype {expected}, but {tv} is "
                    f"{dtype_text(tv.dtype())}"
                )

    def _check_groups(self) -> None:
        """Raises `DefinitionError` if the number of key heads does not divide that of query heads.

        Numbers that are not known yet are not checked.
        """
        heads, groups = (self._joined.get(c) for c in "hg")
        if heads is None or groups is None:
            return
        h, g = (sc.int_value(axis.size) for axis in (heads, groups))
        if h is not None and g and h % g:
            query, key = (self._given[field] for field in ("query", "key"))
            raise fail(
                self._name,
                f"with enable_gqa the number of heads of {key}, {g}, must divide that of {query}, "
                f"{h}",
            )

    def _check_seed(self) -> None:
        for tv, axis in self._mapped.get("p", []):
            size = sc.int_value(axis.size)
            if size not in (None, 2):
                raise fail(self._name, f"philox_seed needs 2 elements, but {tv} has {size}")

    def _check_broadcasts(
        self, letter: str, mapped: Sequence[tuple[TensorView, IterDomain]]
    ) -> None:
        """Raises `DefinitionError` if one operand has size 1 along the axis `letter` and another
        operand has more, unless this is allowed.

        `mapped` has a pair (operand, axis of the operand) for each operand that has an axis with
        this letter. Such a difference is allowed only for axes along which the op repeats an
        operand: all axes of bias and mask, and in the forward op the batch axes of every operand.
        """
        meant = [self._given.get(field) for field in self._op.REPEATED]
        is_batch = not self._op.is_whole(letter) and self._op is SdpaFwdOp
        sizes = [
            (tv, axis.is_broadcast and axis.expanded is None)
            for tv, axis in mapped
            if not (is_batch or any(tv is one for one in meant))
        ]
        one = next((tv for tv, is_one in sizes if is_one), None)
        if one is not None and not all(is_one for _, is_one in sizes):
            other = next(tv for tv, is_one in sizes if not is_one)
            raise fail(
                self._name,
                f"sizes must match along {letter.upper()}, but {one} has 1 element, and {other} "
                "may have several"
                f"{self._flag_for(letter, mapped)}",
            )

    # ------------------------------------------------------------ results
    def result(self, field: str) -> TensorView:
        """Creates the tensor for the result of the op with the name `field`, for example
        "log_sumexp".
        """
        fusion = active_fusion()
        letters = self._letters(field)
        axes: dict[str, IterDomain] = {}
        for c in letters:
            joined = self._joined.get(c)
            if joined is None:  # the two elements of a seed
                axes[c] = fusion.new_axis(sc.const(2))
            else:
                axes[c] = fusion.new_axis(joined.extent, joined.kind, expanded=joined.expanded)
        dtype = self._op.DTYPES.get(field, (self._given["query"].dtype(),))[0]
        # Not `new_output`, which rejects UInt64: only attention stores this dtype.
        return fusion.new_tensor(list(axes.values()), dtype, mesh=mesh_of(self._given.values()))
