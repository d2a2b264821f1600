"""Losses as text: a sum of terms, each a value or LOSS(PREDICTION, TARGET, OPTION=VALUE, …), perhaps times a number."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from amp_rewrite.errors import TrainingError, advice

_NUMBER = r"[\d.]+(?:e[-+]?\d+)?"
_TERM = re.compile(
    rf"\s*(?P<sign>[-+]?)\s*(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<rest>.+?)\s*", re.DOTALL | re.IGNORECASE
)
_SCALED = re.compile(rf"(?P<rest>.+?)\s*(?P<sign>[*/])\s*(?P<number>{_NUMBER})\s*", re.DOTALL | re.IGNORECASE)
_EXPONENT = re.compile(r"[\d.]e$", re.IGNORECASE)
_CALL = re.compile(r"(\w+)\s*\((.*)\)", re.DOTALL)
_OPTION = re.compile(r"(?P<before>.*),\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>\[[^\[\]]*\]|[^,\[\]=]+)\s*", re.DOTALL)

_WORDS = ("sample_weight", "average", "name")
"""Options that are words."""
_ELSEWHERE = {
    **dict.fromkeys(("sparse_categorical_crossentropy", "crossentropy", "crossentropyloss"), "cross_entropy"),
    "categorical_crossentropy": "categorical_cross_entropy",
    **dict.fromkeys(("binary_crossentropy", "bce", "bce_with_logits"), "binary_cross_entropy"),
    **dict.fromkeys(("kl_div", "kld", "kullback_leibler_divergence"), "kl_divergence"),
    **dict.fromkeys(("mse", "l2"), "mean_squared_error"),
    **dict.fromkeys(("mae", "l1"), "mean_absolute_error"),
}
"""Names of losses in Keras and PyTorch, in lower case without "_loss", and those here."""

Known = Callable[[str], bool]
"""True for the name of a value of the model."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a loss. `loss` is empty for a value of the model; `target` is None if the text names none."""

    prediction: str
    loss: str = ""
    target: str | None = None
    factor: float = 1.0
    options: Mapping[str, object] = field(default_factory=dict)


def terms(text: str, known: Known, losses: Mapping[str, Collection[str]]) -> tuple[LossTerm, ...]:
    """Return the terms of a loss. `losses`: the options of each loss by its name.

    Names of values may contain any character; what is the name of a value as a whole is that value. TrainingError
    for an unknown loss or option, and for an option that is not a number, a list, True or False.
    """
    if known(text):
        return (LossTerm(text),)
    if not text.strip():
        raise TrainingError(
            "the loss is empty; use the name of a value, or text such as cross_entropy(LOGITS, TARGETS)"
        )
    splits = (list(_summands(text, signs)) for signs in ("+-", "+"))  # a name may contain a sign
    parts = next((parts for parts in splits if all(_is_term(part, known, losses) for part in parts)), [text])
    return tuple(_term(part, known, losses) for part in parts)


def _summands(text: str, signs: str) -> Iterator[str]:
    """Yield the terms, each with its sign, between these signs outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character in signs and depth == 0 and text[:position].strip() and not _EXPONENT.search(text[:position]):
            yield text[start:position]
            start = position
    yield text[start:]


def _is_term(text: str, known: Known, losses: Mapping[str, Collection[str]]) -> bool:
    _, rest = _factored(text, known)
    call = _CALL.fullmatch(rest)
    return known(rest) or (call is not None and call[1] in losses)


def _factored(text: str, known: Known) -> tuple[float, str]:
    """Split a term into its factor and the rest: "-0.5 * x", "x * 0.5" and "x / 2"."""
    match = _TERM.fullmatch(text)
    if match is None:
        return 1.0, text
    factor = (-1.0 if match["sign"] == "-" else 1.0) * _number(match["factor"] or "1")
    product, rest = factor, match["rest"]
    while not known(rest) and (behind := _SCALED.fullmatch(rest)) is not None:
        number, rest = _number(behind["number"]), behind["rest"]
        if not number:
            raise TrainingError(f"the loss {text.strip()!r} is multiplied or divided by 0; leave such a term out")
        product = product * number if behind["sign"] == "*" else product / number
    return (product, rest) if known(rest) or _CALL.fullmatch(rest) else (factor, match["rest"])


def _term(text: str, known: Known, losses: Mapping[str, Collection[str]]) -> LossTerm:
    factor, rest = _factored(text, known)
    call = _CALL.fullmatch(rest)
    if known(rest) or call is None:
        return LossTerm(rest, factor=factor)
    if call[1] not in losses:
        own = _ELSEWHERE.get(call[1].lower().removesuffix("_loss"))
        hint = f"it is {own} here" if own else advice(call[1], losses, f"use one of {', '.join(losses)}")
        raise TrainingError(f"unknown loss {call[1]!r}; {hint}")
    inside, options = _options(call[1], call[2], known, losses[call[1]])
    prediction, target = _arguments(inside, known)
    return LossTerm(prediction, call[1], target, factor, options)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TrainingError(f"the factor {text!r} of the loss is not a number; write 0.5 * LOSS(…)") from None


def _options(loss: str, text: str, known: Known, allowed: Collection[str]) -> tuple[str, dict[str, object]]:
    """Split options off the end of the arguments of a loss."""
    options: dict[str, object] = {}
    while not known(text.strip()) and (match := _OPTION.fullmatch(text)) is not None:
        name = match["name"]
        if name not in allowed:
            legal = f"it has {', '.join(allowed)}" if allowed else "it has no options"
            raise TrainingError(f"{loss} has no option {name!r}; {advice(name, allowed, legal)}")
        try:
            value = ast.literal_eval(match["value"].strip())
        except (ValueError, SyntaxError):
            value = match["value"].strip()
            if name not in _WORDS:
                raise TrainingError(
                    f"{name}={value} of {loss} is neither a number nor a list of numbers, True or False; correct it"
                ) from None
        if name in options:
            raise TrainingError(f"{loss} sets {name} twice; set it once")
        options[name] = value
        text = match["before"]
    return text, options


def _arguments(text: str, known: Known) -> tuple[str, str | None]:
    """Split a text into prediction and target. Names may contain blanks, commas and brackets; known names win."""
    commas = [match.start() for match in re.finditer(",", text)]
    named = [(text.strip(), None), *((text[:at].strip(), text[at + 1 :].strip()) for at in commas)]
    fallback = named[-1] if len(named) <= 2 else named[0]
    fits = (
        (prediction, goal)
        for prediction, goal in reversed(named)
        if known(prediction) and goal != "" and (goal is None or "," not in goal or known(goal))
    )
    return next(fits, fallback)
