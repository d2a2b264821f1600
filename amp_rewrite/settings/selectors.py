"""Selectors: patterns of ops by name, type and position.

A pattern consists of terms separated by commas; an op must match all of them. Globs support `*`, `?` and `[...]` and
are case-sensitive; `*` also matches "/".

    encoder/*/MatMul     a glob for the node name, the same as name=encoder/*/MatMul
    re:layer\\.[01]\\.     a regular expression to find in the node name; it extends to the end, including commas
    op=MatMul            a glob for the op type, written as in the lists: "com.microsoft::*" for other domains
    scope=encoder/*      a glob for the scope of the op, or for a scope around it: the path in its name, the If,
                         Loop or Scan bodies around it, and the module scopes that torch records; "/" and "."
                         are the same, and a leading one is ignored
    feeds=Softmax        a result reaches an op of that type, directly or only through casts, moves and elementwise
                         arithmetic, including into and out of bodies
    fed_by=Conv          an input comes from an op of that type, in the same way
    input=NAME           a glob for the names of the op's inputs
    output=NAME          a glob for the names of the op's outputs
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from amp_rewrite.errors import PatternError, advice
from amp_rewrite.ir.dataflow import Flow
from amp_rewrite.ir.op_classes import AFFINE, CASTS, MOVES, Slots
from amp_rewrite.ir.ops import ALL
from amp_rewrite.ir.view import Op, OpId, View


@dataclass(frozen=True, slots=True)
class SelectorTerm:
    """A condition: its key, the user's text, and the expression to search for in a name."""

    key: str
    text: str
    expression: re.Pattern[str]


def parse_pattern(text: str) -> tuple[SelectorTerm, ...]:
    """Return the terms of a pattern; PatternError for an unknown key, an empty term or an invalid expression."""
    if not text.startswith("re:"):
        return tuple(_term(text, part) for part in text.split(","))
    expression = text.removeprefix("re:")
    if not expression:
        raise PatternError(f"pattern '{text}': the expression is empty; write one after re:")
    try:
        return (SelectorTerm("name", expression, re.compile(expression)),)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"pattern '{text}': invalid regular expression: {error}; correct it") from error


def matched(view: View, pattern: str) -> bool:
    """True if a pattern matches an op. O(uses) per term."""
    return bool(frozenset.intersection(*_by_term(view, parse_pattern(pattern))))


def exactly(op: Op) -> str:
    """Return the pattern for a single op: its type, and its name or first result."""
    key, name = ("name", op.node.name) if op.node.name else ("output", next(filter(None, op.node.output), "*"))
    glob = re.sub(r"([*[])", r"[\1]", re.sub(r"[,\s]", "?", name))
    return f"op={op.kind},{key}={glob}"


def select(view: View, pattern: str) -> tuple[OpId, ...]:
    """Return the ops that match a pattern, in order. If there are none, see `matches_nothing`. O(uses) per term."""
    terms = parse_pattern(pattern)
    by_term = _by_term(view, terms)
    chosen = frozenset.intersection(*by_term)
    if not chosen:
        unmatched = next((term for term, ops in zip(terms, by_term, strict=True) if not ops), None)
        if unmatched is not None:
            fact = f"no op matches {unmatched.key}={unmatched.text}; {_hint(view, unmatched)}"
        else:
            counts = (f"{term.key}={term.text}: {len(ops)}" for term, ops in zip(terms, by_term, strict=True))
            fact = f"no op matches all its terms ({', '.join(counts)}); commas mean AND, so write several patterns"
        matches_nothing(pattern, f"pattern '{pattern}' matches nothing: {fact}")
    return tuple(sorted(chosen))


def _by_term(view: View, terms: Sequence[SelectorTerm]) -> list[Selected]:
    return [_selected(view, term.key, term.expression) for term in terms]


_UNMATCHED: ContextVar[dict[str, str] | None] = ContextVar("unmatched", default=None)


@contextmanager
def allow_unmatched() -> Iterator[dict[str, str]]:
    """Accept patterns without a match while the body runs; yield a map from each such pattern to its error message.

    A pattern for a repository of models must match in one of the models, not in each.
    """
    unmatched: dict[str, str] = {}
    token = _UNMATCHED.set(unmatched)
    try:
        yield unmatched
    finally:
        _UNMATCHED.reset(token)


def matches_nothing(pattern: str, message: str) -> None:
    """Raise PatternError for a pattern without a match; inside `allow_unmatched`, record it instead."""
    unmatched = _UNMATCHED.get()
    if unmatched is None:
        raise PatternError(message)
    unmatched[pattern] = message


def overrides(view: View, keep: Sequence[str], lower: Sequence[str]) -> tuple[Mapping[OpId, str], Mapping[OpId, str]]:
    """Return the ops that match `keep` and `lower`, each with its first pattern; PatternError if an op matches both."""
    kept, lowered = _first_pattern(view, keep), _first_pattern(view, lower)
    for op in kept:
        if op in lowered:
            both = f"keep {kept[op]!r} and lower {lowered[op]!r}"
            raise PatternError(f"node {view.ops[op].name!r} matches both {both}; narrow one of them")
    return kept, lowered


_CONDUITS: Slots = {
    **dict.fromkeys(AFFINE, ALL),
    **dict.fromkeys(MOVES - {"Tile"} | CASTS | {"Dropout"}, (0,)),
    "Where": (1, 2),
}
"""Ops that pass on a quantity, and the inputs that carry it (for a Reshape, not its shape)."""
_KEY_VALUE = re.compile(r"\s*(\w+)\s*=(.*)", re.DOTALL)
TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_TEXTS = re.compile(rf"\[\s*(?:(?:{_TEXT.pattern})\s*(?:,\s*|(?=\])))*\]")
Selected = frozenset[OpId]


def _term(pattern: str, part: str) -> SelectorTerm:
    match = _KEY_VALUE.fullmatch(part)
    key, value = match.groups() if match else ("name", part)
    value = value.strip()
    if key not in _KEYS:
        raise PatternError(f"pattern '{pattern}': unknown key {key!r}; {advice(key, _KEYS)}")
    if not value:
        raise PatternError(f"pattern '{pattern}': a term is empty; write KEY=VALUE or a glob for the node name")
    if key in ("op", "feeds", "fed_by"):
        value = value.removeprefix("ai.onnx::")
    globs = (_path(value), f"{_path(value)}/*") if key == "scope" else (value,)
    return SelectorTerm(key, value, re.compile("|".join(rf"\A{fnmatch.translate(glob)}" for glob in globs)))


def _selected(view: View, key: str, expression: re.Pattern[str]) -> Selected:
    if key == "feeds":
        inputs = (v for op in _selected(view, "op", expression) for v in view.ops[op].operands)
        producers = map(view.producer, Flow(view, _CONDUITS).back(inputs))
        return frozenset(op.id for op in producers if op is not None)
    if key == "fed_by":
        results = (v for op in _selected(view, "op", expression) for v in view.ops[op].results)
        return frozenset(use.op for value in Flow(view, _CONDUITS).forth(results) for use in view.uses[value])
    texts = _TERM_TEXTS[key]
    return frozenset(op.id for op in view.ops if any(map(expression.search, texts(view, op))))


def _path(name: str) -> str:
    return name.replace(".", "/").lstrip("/")


def _positions(view: View, op: Op) -> Iterator[str]:
    body = view.scopes[op.scope].path
    yield _path(op.name)
    if body and not op.name.startswith(body):
        yield _path(body + op.name)
    for entry in op.node.metadata_props:
        if entry.key == TORCH_SCOPES:
            yield from map(_path, filter(None, torch_scopes(entry.value)))


def torch_scopes(text: str) -> list[str]:
    """Return the scopes in torch's metadata, outermost first; none unless it is a Python list of strings.

    Escapes are kept. Python's own parser is not safe here, since it warns and fails in many ways. Text that is not
    UTF-8 is passed as bytes.
    """
    return [name[1:-1] for name in _TEXT.findall(text)] if isinstance(text, str) and _TEXTS.fullmatch(text) else []


_TERM_TEXTS: Mapping[str, Callable[[View, Op], Iterable[str]]] = {
    "name": lambda view, op: (op.name,),
    "op": lambda view, op: (op.kind,),
    "scope": _positions,
    "input": lambda view, op: (view.value_name(value) for value in op.inputs if value is not None),
    "output": lambda view, op: (view.value_name(value) for value in op.outputs if value is not None),
}
"""Functions that return the texts of an op to match with a glob, by the key of the term."""
_KEYS = ("name", "op", "scope", "feeds", "fed_by", "input", "output")


def _first_pattern(view: View, patterns: Sequence[str]) -> dict[OpId, str]:
    chosen: dict[OpId, str] = {}
    for pattern in patterns:
        for op in select(view, pattern):
            chosen.setdefault(op, pattern)
    return dict(sorted(chosen.items()))


def _hint(view: View, term: SelectorTerm) -> str:
    if term.key == "name" and term.text in view.by_kind:
        return f"did you mean 'op={term.text}'?"
    texts = _TERM_TEXTS.get(term.key, _TERM_TEXTS["op"])
    candidates = (text for op in view.ops for text in texts(view, op))
    if term.key == "scope":
        candidates = (text.rpartition("/")[0] for text in candidates)
    return glob_advice(term.text, candidates, "'amp-rewrite report -v' prints the names")


def glob_advice(text: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return "did you mean …?" with the candidate closest to a glob, ignoring case and domain, or `otherwise`."""
    bare = re.sub(r"[*?]", "", text).lower().strip("/")
    spellings: dict[str, str] = {}
    for candidate in candidates:
        spellings.setdefault(candidate.lower(), candidate)
        spellings.setdefault(candidate.rpartition("::")[2].lower(), candidate)
    return advice(bare, spellings, otherwise, shown=spellings)
