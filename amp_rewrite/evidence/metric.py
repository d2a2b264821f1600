"""Comparison of two arrays by a metric or tolerance; docs/reference/verify.md has the formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np

from amp_rewrite.errors import PolicyError, advice, spelled
from amp_rewrite.files.casting import Array
from amp_rewrite.reports.evidence import ALLCLOSE, Criterion, Difference
from amp_rewrite.runtime.runner import Value
from amp_rewrite.settings.option import CriterionKeywords, Kind, check_keyword
from amp_rewrite.settings.request import CRITERION, STARTS


def cosine(a: Array, b: Array) -> float:
    """Return sum ab / sqrt(sum a^2 sum b^2); 1 if both arrays are zero, 0 if only one is."""
    a, b = _scaled_down(a, b)
    if not a.any() and not b.any():
        return 1.0
    norms = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / norms if norms else 0.0


def snr(a: Array, b: Array) -> float:
    """Return the signal-to-noise ratio, 10 log10(sum a^2 / sum (a-b)^2), in dB; infinity for equal arrays."""
    a, b = _scaled_down(a, b)
    signal, noise = float(a @ a), float((a - b) @ (a - b))
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal / noise > 0 else -math.inf


def _scaled_down(a: Array, b: Array) -> tuple[Array, Array]:
    largest = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)) or 1.0
    return a / largest, b / largest


def top1(a: Array, b: Array) -> float:
    """Return the share of rows along the last axis with the same argmax in both arrays.

    Raise PolicyError for arrays of rank 0 or with a last axis of one element.
    """
    if a.ndim == 0 or a.shape[-1] < 2:
        raise PolicyError(
            f"top1 needs two or more classes along the last axis, but the shape is {list(a.shape)}; choose another"
            " metric, or compare only the outputs that contain class scores"
        )
    return float(np.mean(a.argmax(-1) == b.argmax(-1))) if a.size else 1.0


def scaled(a: Array, b: Array) -> float:
    """Return max |a-b| / max |a|: the largest error relative to the reference's largest value."""
    error, largest = float(np.abs(a - b).max(initial=0.0)), float(np.abs(a).max(initial=0.0))
    if not error:
        return 0.0
    return error / largest if largest else math.inf


class Measure(NamedTuple):
    """A similarity or distance between two arrays, ranging from `low` to `high`.

    `function` gets flat float64 arrays of the values that are finite on both sides; for top1, it gets the whole arrays.
    `suggested`: the example bound in error messages.
    """

    function: Callable[[Array, Array], float]
    suggested: float
    low: float = -math.inf
    high: float = math.inf


MEASURES: Mapping[str, Measure] = {
    "cosine": Measure(cosine, 0.999, -1.0, 1.0),
    "snr": Measure(snr, 40),
    "top1": Measure(top1, 0.99, 0.0, 1.0),
    "scaled": Measure(scaled, 0.01, 0.0),
}


def criterion(**keywords: Unpack[CriterionKeywords]) -> Criterion:
    """Return the criterion for a tolerance, for rtol and/or atol, or for a metric with its bound; there is no default.

    `tolerance` is the bound of the metric "scaled". `metric`: a name in MEASURES with its bound, as in "cosine=0.999".
    Raise PolicyError if none of them, or more than one, is passed, or if a bound is invalid.
    """
    bounds: dict[str, Any] = {name: value for name in CRITERION if (value := keywords.get(name)) is not None}
    if not bounds:
        raise PolicyError(
            f"no criterion was given, and there is no default; pass {spelled('tolerance')}, {spelled('rtol')} and/or"
            f" {spelled('atol')}, or {spelled('metric')} with its bound; a good start is a tolerance of {STARTS}"
        )
    if len(bounds) > 1 and bounds.keys() != {"rtol", "atol"}:
        raise PolicyError(f"{' and '.join(map(spelled, bounds))} exclude each other; choose one")
    for name, value in bounds.items():
        if CRITERION[name].kind is Kind.NUMBER:
            check_keyword(name, value, "float | None")
            if not 0 <= value < math.inf:
                raise PolicyError(f"{spelled(name, value)}: use a finite number, 0 or more")
            bounds[name] = float(value)
    if "tolerance" in bounds:
        return Criterion("scaled", bounds["tolerance"])
    return _parsed(bounds["metric"]) if "metric" in bounds else Criterion(ALLCLOSE, **bounds)


def _parsed(metric: object) -> Criterion:
    name, _, bound = (part.strip() for part in str(metric).partition("="))
    if name not in MEASURES:
        legal = f"use one of {', '.join(MEASURES)} with a bound"
        raise PolicyError(f"unknown metric {name!r}; {advice(name, MEASURES, legal)}")
    measure = MEASURES[name]
    try:
        limit = float(bound)
    except ValueError:
        limit = math.nan
    if not measure.low <= limit <= measure.high or abs(limit) >= sys.float_info.max:
        span = "" if math.isinf(measure.low) else f" from {measure.low:g} to {measure.high:g}"
        example = spelled("metric", f"{name}={measure.suggested:g}")
        raise PolicyError(f"{spelled('metric', metric)} needs a finite bound{span}, as in {example}")
    return Criterion(name, limit)


def compare(a: Array, b: Array, by: Criterion, *, equal_nan: bool = False) -> Difference:
    """Return the difference of `b` from the reference `a`. O(elements).

    The criterion applies to floating-point values (a complex value counts as two). Integers, booleans and strings must
    be equal. The arrays must have equal shapes and types of the same kind; float32 and float16 are the same kind. A
    value that is infinite or NaN on only one side fails, and so do infinities of opposite sign, and NaN on both sides
    unless `equal_nan`. Arrays without finite elements pass with `compared` 0 if nothing else fails.
    """
    kind = _kind(a)
    if kind != _kind(b) or a.shape != b.shape:
        what, x, y = ("shape", [*a.shape], [*b.shape]) if kind == _kind(b) else ("element type", _type(a), _type(b))
        return Difference(a.size, False, f"the {what} is {x} in the reference and {y} in the candidate")
    return _judged(_float64(a), _float64(b), by, equal_nan) if kind == "float" else _equal(a, b)


def _kind(array: Array) -> str:
    """Return the kind of an element type by its name, because every ml_dtypes type has kind V in numpy."""
    name = array.dtype.name
    if name.startswith(("float", "bfloat", "complex")):
        return "float"
    if name.startswith(("int", "uint")):
        return "integer"
    return "bool" if name == "bool" else "string"


def _type(array: Array) -> str:
    return "string" if _kind(array) == "string" else array.dtype.name


def _float64(array: Array) -> Array:
    if array.dtype.kind != "c":
        return array.astype(np.float64)
    return np.ascontiguousarray(array, np.complex128).view(np.float64).reshape(*array.shape, 2)


def _equal(a: Array, b: Array) -> Difference:
    unequal = np.flatnonzero((a != b).reshape(-1))
    same = Difference(a.size, True, "equal", compared=a.size)
    if _kind(a) != "string" and a.size:
        same = replace(same, max_abs=float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()))
    if not unequal.size:
        return same
    because = f"{unequal.size} of {a.size} values differ, and {_kind(a)} values must be equal"
    return _at(replace(same, ok=False, because=because), a, b, int(unequal[0]))


def _judged(a: Array, b: Array, by: Criterion, equal_nan: bool) -> Difference:
    on_a, on_b = np.isfinite(a), np.isfinite(b)
    finite = on_a & on_b
    x, y = a[finite], b[finite]
    nonfinite = (int(a.size - on_a.sum()), int(a.size - on_b.sum()))
    difference = Difference(a.size, True, "", nonfinite=nonfinite)
    with np.errstate(all="ignore"):
        alike = (a == b) | (np.isnan(a) & np.isnan(b) & equal_nan)
        error = units = np.abs(x - y)
        if by.name == ALLCLOSE:  # error relative to the allowed error; 0 or infinity if none is allowed
            allowed = by.atol + by.rtol * np.abs(x)
            units = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
        if x.size:
            at = int(np.flatnonzero(finite.reshape(-1))[units.argmax()])
            compared = replace(difference, compared=x.size, max_abs=float(error.max()), scaled=scaled(x, y))
            difference = _at(compared, a, b, at)
        unequal = np.flatnonzero(~(finite | alike).reshape(-1))
        if unequal.size:
            return _at(replace(difference, ok=False, because=_not_finite(a, b, unequal)), a, b, int(unequal[0]))
        if not x.size:
            return replace(difference, because="no value is finite, and all agree" if a.size else "no elements")
        if by.name == ALLCLOSE:
            score = float(units.max())
        else:
            score = float(MEASURES[by.name].function(*((a, b) if by.name == "top1" else (x, y))))
    because = f"{by.measured} {score:.4g}; {'at least' if by.higher else 'at most'} {by.limit:g} is required"
    if infinite := int(finite.size - finite.sum()):
        because += f"; {infinite} nonfinite values agree"
    return replace(difference, score=score, ok=by.passes(score), because=because)


def _not_finite(a: Array, b: Array, mismatched: Array) -> str:
    x, y = a.reshape(-1)[mismatched], b.reshape(-1)[mismatched]
    both = int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
    if both == mismatched.size:
        return f"{both} of {a.size} values are NaN on both sides, which proves nothing"
    lost = int(np.count_nonzero(np.isfinite(x)))
    if lost:
        return f"{lost} of {a.size} values are NaN or infinite where the reference is finite"
    return f"{mismatched.size} of {a.size} values are not finite and differ"


def _at(difference: Difference, a: Array, b: Array, flat: int) -> Difference:
    where = tuple(int(i) for i in np.unravel_index(flat, a.shape))
    return replace(difference, where=where, reference=_text(a[where]), candidate=_text(b[where]))


def _text(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, (float, np.floating)) else str(value)[:60]


# -- sequences, maps and optionals ---------------------------------------------------------------------------


def differences(
    a: Value, b: Value, by: Criterion, *, equal_nan: bool = False, part: str = ""
) -> Iterator[tuple[str, Difference]]:
    """Yield the name and the difference of each part of an output.

    A map is one part, and so is a sequence of maps, which becomes a matrix if all its maps have the same keys, as the
    outputs of ZipMap do. An empty sequence or optional counts as one value.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        yield part, compare(a, b, by, equal_nan=equal_nan)
    elif a is None and b is None:
        yield part, Difference(0, True, "no value on either side", compared=1)
    elif isinstance(a, dict) and isinstance(b, dict):
        difference = _by_key([a], [b], by, equal_nan)
        yield part, replace(difference, where=difference.where[1:] if difference.where else None)
    elif not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        yield part, Difference(0, False, f"the reference returns {_container(a)}, the candidate {_container(b)}")
    elif not a:
        yield part, Difference(0, True, "an empty sequence on both sides", compared=1)
    elif all(isinstance(entries, dict) for entries in (*a, *b)):
        yield part, _by_key(a, b, by, equal_nan)
    else:
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, by, equal_nan=equal_nan, part=f"{part}[{i}]")


Maps = Sequence[Mapping[Any, Any]]


def _by_key(a: Maps, b: Maps, by: Criterion, equal_nan: bool) -> Difference:
    uniform = all(entries.keys() == a[0].keys() for entries in a)
    places = [(place, key) for place, entries in enumerate(a) for key in (a[0] if uniform else entries)]
    for here, side, there in ((a, "in the candidate", b), (b, "in the reference", a)):
        if lost := [(place, key) for place, entries in enumerate(here) for key in entries if key not in there[place]]:
            (place, key), more = lost[0], f" (and {len(lost) - 1} more)" if lost[1:] else ""
            return Difference(len(places), False, f"the key {key!r} of map {place}{more} is missing {side}")
    rows = (len(a), -1) if uniform else (-1,)
    x, y = (np.array([maps[place][key] for place, key in places]).reshape(rows) for maps in (a, b))
    difference = compare(x, y, by, equal_nan=equal_nan)
    if difference.where is None:
        return difference
    return replace(difference, where=places[int(np.ravel_multi_index([int(i) for i in difference.where], x.shape))])


def _container(value: Value) -> str:
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    return "nothing" if value is None else "a map" if isinstance(value, dict) else "a tensor"
