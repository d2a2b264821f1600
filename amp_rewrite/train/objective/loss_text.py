"""Losses as text: LOSS(PREDICTION, TARGET, OPTION=VALUE, …)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from amp_rewrite.errors import TrainingError, advice

_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_OPTION = re.compile(r"(?P<before>.*),\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>\[[^\[\]]*\]|[^,\[\]=]+)\s*", re.DOTALL)

_WORD = "sample_weight"
"""The option that is a word."""
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
class LossCall:
    """A loss as text. `target` is None if the text names none."""

    loss: str
    prediction: str
    target: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def parsed(text: str, known: Known, losses: Mapping[str, Collection[str]]) -> LossCall | None:
    """Return the call of a loss; None for a text of another form. `losses`: the options of each loss by its name.

    Names of values may contain any character. TrainingError for an unknown loss or option, and for an option that is
    not a number, a list, True or False.
    """
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    if call[1] not in losses:
        own = _ELSEWHERE.get(call[1].lower().removesuffix("_loss"))
        hint = f"it is {own} here" if own else advice(call[1], losses, f"use one of {', '.join(losses)}")
        raise TrainingError(f"unknown loss {call[1]!r}; {hint}")
    inside, options = _options(call[1], call[2], known, losses[call[1]])
    prediction, target = _arguments(inside, known)
    return LossCall(call[1], prediction, target, options)


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
            if name != _WORD:
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
