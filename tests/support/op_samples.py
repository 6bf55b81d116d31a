"""The values, dtypes and ranks that random tests may use for each op."""

from __future__ import annotations

from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ops.elementwise import DTYPE_RULES
from fuser.ops.rows import OpRow
from fuser.support.record import record


@record
class Domain:
    """The range of an operand's values: limits for floats, and inclusive limits for integers."""

    floats: tuple[float, float]
    integers: tuple[int, int]


DOMAINS: dict[str, Domain] = {
    "any": Domain((-4.0, 4.0), (-9, 9)),
    "unit": Domain((-0.95, 0.95), (0, 0)),
    "positive": Domain((0.05, 6.0), (1, 12)),
    "above_one": Domain((1.05, 6.0), (2, 12)),
    "below_two": Domain((0.05, 1.95), (1, 1)),
    "nonzero": Domain((0.5, 4.0), (1, 9)),
    "shift": Domain((0.0, 6.0), (-2, 70)),
    "wide": Domain((-1e4, 1e4), (-(2**30), 2**30)),
}


@record
class Sample:
    """A class of operands: categories of dtypes, numbers of axes, and domains.

    There is one domain for each operand, or one for all. Categories are f (floating), w (Float and
    Double), i (integers), b (Bool) and c (complex; both parts are drawn like floats).
    """

    takes: str
    ranks: tuple[int, int]
    domains: tuple[str, ...] = ("any",)


SAMPLES: dict[str, Sample] = {
    "values": Sample("fibc", (0, 4)),
    "real_values": Sample("fib", (0, 4)),
    "wide_values": Sample("w", (0, 4)),
    "complex_values": Sample("c", (0, 4)),
    "numbers": Sample("fi", (0, 4)),
    "any_numbers": Sample("fic", (0, 4)),
    "shifts": Sample("i", (0, 4), ("wide", "shift")),
    "floats": Sample("f", (0, 4)),
    "rows": Sample("fibc", (1, 4)),
    "real_rows": Sample("fib", (1, 4)),
    "number_rows": Sample("fi", (1, 4)),
    "any_number_rows": Sample("fic", (1, 4)),
    "float_rows": Sample("f", (1, 4)),
    "any_float_rows": Sample("fc", (1, 4)),
    "any_wide_rows": Sample("wc", (1, 4)),
    "matrices": Sample("fibc", (2, 4)),
    "factors": Sample("fc", (1, 4)),
    "real_factors": Sample("f", (1, 4)),
    "heads": Sample("f", (4, 5)),
    "sizes": Sample("", (0, 0)),
}


def sample_of(row: OpRow) -> Sample:
    """Returns the operands that may be drawn for an op; for elementwise ops, by its dtype
    rule.
    """
    if row.sample:
        return SAMPLES[row.sample]
    kind, rule = PUBLIC[row.name]
    row_of = POINTWISE[kind]
    more = ("b" if row_of.of_bools else "") + ("c" if row_of.takes_complex else "")
    return Sample(DTYPE_RULES[rule].takes + more, (0, 4), row_of.domains)
