"""Optimizers by name, from text and from configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from amp_rewrite.errors import TrainingError
from amp_rewrite.settings.loss_scale import class_of
from amp_rewrite.train.update.optimizers.adam import Adam, AdamW
from amp_rewrite.train.update.optimizers.descent import SGD, Adagrad, RMSprop
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import rate_of_config

OPTIMIZERS: Mapping[str, type[Optimizer]] = {c.__name__.lower(): c for c in (SGD, RMSprop, Adam, AdamW, Adagrad)}
"""Optimizer classes by name in lower case."""
_COMMA = re.compile(r",(?![^()]*(?:\([^()]*\)[^()]*)*\))")
"""A comma outside brackets, which stand one in another at most."""


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the optimizer of a `serialize` result. TrainingError for anything else.

    `custom_objects`: classes by name, besides those of the package: subclasses of Optimizer, of StatefulOptimizer
    or of Schedule.
    """
    optimizer_class, inner = class_of(config, "optimizer", OPTIMIZERS, custom_objects)
    if "learning_rate" in inner:
        inner = {**inner, "learning_rate": rate_of_config(inner["learning_rate"], custom_objects)}
    return optimizer_class.from_config(inner)


def named(text: str) -> Optimizer:
    """Parse an optimizer such as "adam" or "sgd,learning_rate=0.1,momentum=0.9,nesterov=true".

    Parameter groups are separated by ";": "adamw,lr=0.001,groups=head.* rate=10; *.bias weight_decay=0".

    `lr` is short for learning_rate; it may be a schedule: "adamw,lr=cosine(0.001, decay_steps=900)".

    TrainingError for an unknown name, hyperparameter or value.
    """
    name, *settings = [part.strip() for part in _COMMA.split(text)]
    optimizer_class = OPTIMIZERS.get(name.lower())
    if optimizer_class is None:
        raise TrainingError(f"unknown optimizer {name!r}; use one of {', '.join(OPTIMIZERS)}")
    config: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        key = "learning_rate" if key == "lr" else key
        if key in config:
            raise TrainingError(f"optimizer {name!r} sets {key} twice; set it once")
        try:
            config[key] = _parsed(key, value)
        except ValueError:
            raise TrainingError(f"optimizer {name!r}: {setting!r} is not a setting; write NAME=NUMBER") from None
    return optimizer_class.from_config(config)


def _parsed(key: str, value: str) -> Any:
    """Return the value of a setting in a text. ValueError for one that is not a number, where it must be."""
    if key == "groups" or (key == "learning_rate" and "(" in value):
        return value
    return value.lower() == "true" if value.lower() in ("true", "false") else float(value)
