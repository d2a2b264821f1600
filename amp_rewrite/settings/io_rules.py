"""Rules for lowering inputs and outputs of a model, or keeping them in float32."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PatternError, PolicyError, advice
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.view import MAIN, ValueId, View

_CACHE = re.compile(
    r"(?:self_|cross_)?(?:past|present)(?:_key_values)?"
    r"(?:[._](?:key|value|self|cross|encoder|decoder|conv|ssm|[0-9]+))+"
)
"""Names of caches. Optimum and transformers.js use names like `past_key_values.0.decoder.key` and
`present.0.decoder.key`. Onnxruntime-genai also uses `past_0`, `past_key_self_0` and `present_value_cross_0`, and
convolutions and state-space models use `past_conv.0` and `past_ssm.0`. Lengths, masks and data, for example
`past_values`, do not match."""


@dataclass(frozen=True, slots=True)
class IoRule:
    """A type for inputs ("in"), outputs ("out") or both ("") with matching `names`; None for the low type.

    `strict`: at least one float32 input or output must match. For caches, one in the low type is enough.
    """

    text: str
    side: str
    glob: str
    names: re.Pattern[str]
    dtype: DType | None
    strict: bool = True


def parse_io(rules: str | Iterable[str] | None) -> tuple[IoRule, ...]:
    """Parse the rules "keep", "low", "caches" or "GLOB=TYPE", optionally preceded by "in:" or "out:".

    PatternError for other text.
    """
    return tuple(_io_rule(text.strip()) for text in as_names(rules))


def io_types(view: View, rules: Sequence[IoRule], to: DType) -> Mapping[ValueId, DType]:
    """Return the new types of inputs and outputs in float32 or another low type.

    The last matching rule wins. PatternError for a type other than float32 and the low type of the conversion, and for
    a rule without a match (see `matches_nothing`).
    """
    main = view.scopes[MAIN]
    dtypes = {DType.FLOAT, *(dtype for dtype in view.low_types if dtype is not to)}
    ends = {"in": main.inputs, "out": main.outputs}
    sides = {side: [v for v in values if view.tensor_dtype(v) in dtypes] for side, values in ends.items()}
    chosen: dict[ValueId, DType | None] = {}
    for rule in rules:
        if rule.dtype not in (None, DType.FLOAT, to):
            raise PatternError(
                f"io {rule.text!r}: the model is lowered to {to.spelling}; use {to.spelling} or float32 here"
            )
        candidates = [v for side, values in sides.items() if rule.side in ("", side) for v in values]
        matched = [v for v in candidates if rule.names.fullmatch(view.value_name(v))]
        if rule.strict and not matched:
            _match_nothing(view, rule, [view.value_name(v) for v in candidates])
        kept = rule.dtype is DType.FLOAT and not rule.strict
        chosen.update((v, None if kept else rule.dtype or to) for v in matched)
    return {v: dtype for v, dtype in sorted(chosen.items()) if dtype not in (None, view.dtype(v))}


def _match_nothing(view: View, rule: IoRule, names: Sequence[str]) -> None:
    from amp_rewrite.settings.selectors import glob_advice, matches_nothing  # late: most rules match

    main = view.scopes[MAIN]
    if rule.names is _CACHE and any(_CACHE.fullmatch(view.value_name(v)) for v in (*main.inputs, *main.outputs)):
        return
    known = f"the names are {', '.join(names[:5])}" if names else "the model does not have any"
    kind = {"in": "input", "out": "output", "": "input or output"}[rule.side]
    like = "like a key-value cache" if rule.names is _CACHE else repr(rule.glob)
    hint = glob_advice(rule.glob, names, known)
    matches_nothing(rule.text, f"io {rule.text!r}: no float32 {kind} is named {like}; {hint}")


def _io_rule(text: str) -> IoRule:
    prefix, colon, rest = text.partition(":")
    side, body = (prefix, rest) if colon and prefix in ("in", "out") else ("", text)
    if body in _WORDS:
        return IoRule(text, side, body, *_WORDS[body])
    glob, equals, spelling = body.rpartition("=")
    glob = glob.strip()
    if not equals or not glob:
        raise PatternError(f"io {text!r} is not a rule; {advice(body, _WORDS, _FORMS)}")
    try:
        return IoRule(text, side, glob, re.compile(fnmatch.translate(glob)), DType.parse(spelling))
    except PolicyError as error:
        raise PatternError(f"io {text!r}: {error}") from error


_ANY = re.compile(".*", re.DOTALL)
_WORDS: Mapping[str, tuple[re.Pattern[str], DType | None, bool]] = {
    "keep": (_ANY, DType.FLOAT, False),
    "low": (_ANY, None, False),
    "caches": (_CACHE, None, True),
}
_FORMS = "write keep, low, caches or GLOB=TYPE, optionally preceded by in: or out:"
