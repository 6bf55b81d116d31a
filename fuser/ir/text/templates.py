"""The text templates of ops as grammar: words to match, fields to read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fuser.ir.op import Op
from fuser.ir.ops import attention_ops, lookup, resizing
from fuser.support.record import record

# Where tensor ops are declared: a text may name any of them.
DECLARING = (attention_ops, lookup, resizing)


@record
class Template:
    """One spelling of an op: words to match and fields to read, in order."""

    op: type[Op]
    text: str
    attributes: Mapping[str, object]
    words: tuple[tuple[bool, str], ...]
    kinds: Mapping[str, str]
    types: Mapping[str, str]
    is_older: bool


_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
_FUNCTION = re.compile(r"\s*([A-Za-z_](?:[\w.]|::)*)\s*\(")
# Extents of a result may compare, too.
_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")
_STATEMENT = re.compile(r"\s*(?!T\d)([A-Za-z_]\w*)")


def key_of(text: str, start: int) -> str:
    """Return what an op's text starts with: its statement word, or the function after `=`."""
    word = _STATEMENT.match(text, start)
    if word:
        return word[1]
    equals = _EQUALS.search(text, start)
    function = _FUNCTION.match(text, equals.end()) if equals else None
    return function[1] if function else ""


@lru_cache(maxsize=16)
def templates_of(ops: tuple[type[Op], ...]) -> Mapping[str, list[Template]]:
    """Return the spellings of the op classes by key; operators and literals come under ''."""
    buckets: dict[str, list[Template]] = {"": []}
    for op in ops:
        seen: set[tuple[str, str]] = set()
        for attributes, text, is_older in _spellings(op):
            mark = (text, repr(sorted(attributes.items(), key=lambda kv: kv[0])))
            if mark in seen:
                continue
            seen.add(mark)
            template = _compiled(op, attributes, text, is_older)
            buckets.setdefault(key_of(text, 0), []).append(template)
    return buckets


def _spellings(op: type[Op]) -> Iterable[tuple[dict[str, object], str, bool]]:
    variants = getattr(op, "variants", None)
    if variants is None:
        if op.TEXT:
            yield {}, op.TEXT, False
    else:
        for attributes, text in variants():
            yield attributes, text, False
    for text in getattr(op, "OLDER", ()):
        yield {}, text, True


def _compiled(
    op: type[Op], attributes: Mapping[str, object], text: str, is_older: bool
) -> Template:
    words: list[tuple[bool, str]] = []
    at = 0
    for field in _PLACEHOLDER.finditer(text):
        words += [(False, w) for w in text[at : field.start()].split()]
        words.append((True, field[1]))
        at = field.end()
    words += [(False, w) for w in text[at:].split()]
    fields = dataclasses.fields(op)  # pyright: ignore[reportArgumentType]
    return Template(
        op,
        text,
        attributes,
        tuple(words),
        {f.name: str(f.metadata["kind"]) for f in fields if "kind" in f.metadata},
        {f.name: str(f.type) for f in fields},
        is_older,
    )


def template_of(op: Op) -> str:
    template = getattr(op, "template", None)
    return template() if template is not None else op.TEXT


def tensor_op_classes() -> tuple[type[Op], ...]:
    """Return the declared tensor ops, in declaration order; bases of others are none."""
    return tuple(
        c
        for c in Op.REGISTRY.values()
        if issubclass(c, attention_ops.TensorOp) and not c.__subclasses__()
    )
