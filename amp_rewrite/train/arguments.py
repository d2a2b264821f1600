"""Argument checks of the training API: wrong calls, names and values raise errors with a hint.

Users of Keras and PyTorch type the names that they know. `HINTS` maps those names to the names used here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import isfunction
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from amp_rewrite.errors import AmpRewriteError, TrainingError, advice, one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.settings.option import legal_forms

_TRAINABLE = "use trainable_variables, or get_weights() for all values"
HINTS: Mapping[str, str] = {
    "lr": "use learning_rate",
    "learning_rate": "pass it to the optimizer, as in SGD(0.1)",
    **{name.replace("_", ""): f"use {name}" for name in ("beta_1", "beta_2", "batch_size", "training_mode")},
    "betas": "use beta_1 and beta_2",
    "eps": "use epsilon",
    "nb_epoch": "use epochs",
    "class_weight": "pass class_weights=[…] to the loss, as in 'cross_entropy(logits, label, class_weights=[1, 2])'",
    "sample_weight": "pass sample_weight=NAME to the loss, as in 'cross_entropy(logits, label, sample_weight=weight)',"
    " and the weights with the data",
    "run_eagerly": "omit it, since onnxruntime runs a step as one graph",
    "loss_weights": "a loss is one formula for one output; compute the sum of losses in the model, and name that value",
    "dynamic_axes": "use dynamic, as in dynamic={'input': {0: 'batch'}}",
    "training": "pass training_mode when you create the network",
    "provider": "use providers, a list of names",
    # attributes
    **dict.fromkeys(("weights", "variables", "trainable_weights", "parameters", "named_parameters"), _TRAINABLE),
    "state_dict": "get_weights() and checkpoint() return the values, and save(path) writes them",
    "train": "create the network with training_mode=True to enable dropout and batch statistics",
    "eval": "predict and evaluate always run in evaluation mode",
    "watch": "omit it, since a tape watches all variables of a network",
    "step": "use apply_gradients(zip(gradients, variables)) or minimize(loss)",
    "zero_grad": "omit it, since gradients are returned and not accumulated",
    "param_groups": "set hyperparameters such as learning_rate, which apply to all parameters",
    "backward": "use GradientTape().gradient(loss, variables)",
    "AUC": "compute it from predict(x), for example with scikit-learn",
    "CrossEntropy": "use SparseCategoricalCrossentropy for class indices, CategoricalCrossentropy for probabilities",
    "CrossEntropyLoss": "use SparseCategoricalCrossentropy(from_logits=True)",
}
"""Names from Keras and PyTorch that do not exist here, each with a hint."""

_T = TypeVar("_T")


def checked_arguments(*, options: Any = None) -> Callable[[_T], _T]:
    """Decorate a function, or a class and its public methods, to raise a TrainingError with a hint for a wrong call.

    A call is wrong if its arguments do not match the signature, or if it fails and an argument does not have the
    declared type.

    `options`: the TypedDict of the `**options` parameter.
    """
    declared = {name: _text(kind) for name, kind in getattr(options, "__annotations__", {}).items()}

    def checked(target: _T) -> _T:
        if not isinstance(target, type):
            return _checked(target, declared)  # type: ignore[no-any-return]
        for name, member in [*vars(target).items()]:
            inner = getattr(member, "__func__", member)
            public = name in ("__init__", "__call__") or not name.startswith("_")
            if public and isfunction(inner) and not hasattr(inner, "__wrapped__"):
                wrapped = _checked(inner, declared if name == "__init__" else {})
                setattr(target, name, wrapped if inner is member else type(member)(wrapped))
        return target

    return checked


def _checked(function: Any, options: Mapping[str, str]) -> Any:
    signature = inspect.signature(function)
    declared = {name: _text(p.annotation) for name, p in signature.parameters.items()} | {**options}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if options and not kwargs.keys() <= declared.keys():
                raise TypeError("an unknown option")
            return function(*args, **kwargs)
        except AmpRewriteError:
            raise
        except (AttributeError, TypeError, ValueError) as cause:
            message = _misuse(function, signature, declared, args, kwargs)
            if message is None:
                raise
            raise TrainingError(message) from cause

    return call


def _misuse(
    function: Any,
    signature: inspect.Signature,
    declared: Mapping[str, str],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str | None:
    """Return an error message with a hint for a wrong call; None if the arguments match the signature."""
    formals, name = [*signature.parameters.values()], function.__qualname__
    if formals and formals[0].name in ("self", "cls"):
        owner = getattr(args[0], "__name__", type(args[0]).__name__)
        name = owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"
        formals, args = formals[1:], args[1:]
    accepted = [p.name for p in formals if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    accepted += [key for key in declared if key not in signature.parameters]
    unknown = next((key for key in kwargs if key not in accepted), None)
    if unknown is not None:
        hint = HINTS.get(unknown) or advice(unknown, accepted, f"it takes {', '.join(accepted) or 'nothing'}")
        return f"{name} does not take {unknown!r}; {hint}"
    form = inspect.Signature([p.replace(annotation=p.empty) for p in formals])
    try:
        bound = form.bind(*args, **kwargs).arguments
    except TypeError as error:
        return f"{name}: {error}; call {name}{form}"
    for key, value in {**bound, **kwargs}.items():
        if key in accepted and (legal := legal_forms(value, declared[key], function.__globals__)):
            return f"{key} of {name} must be {legal}, not {quoted(value)}"
    return None


def _text(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def unknown_attribute(owner: type, name: str) -> AttributeError:
    names = sorted(n for n in {*dir(owner), *getattr(owner, "__dataclass_fields__", ())} if not n.startswith("_"))
    hint = HINTS.get(name) or advice(name, names, f"it has {', '.join(names)}")
    return AttributeError(f"{owner.__name__} has no {name!r}; {hint}")


class AttributeHints:
    """Mixin: unknown attributes raise an AttributeError with a hint."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            owner = self if isinstance(self, type) else type(self)
            raise AttributeError(name) if name.startswith("_") else unknown_attribute(owner, name)


class Namespace(type, AttributeHints):
    """Metaclass of namespaces: unknown attributes raise an AttributeError with a hint."""


_MAX_LENGTH = 60


def quoted(value: object) -> str:
    """Return the repr of a value for a message: on one line, or only its type if the repr is long."""
    text = one_line(repr(value))
    return text if len(text) <= _MAX_LENGTH else f"{type(value).__module__.partition('.')[0]}'s {type(value).__name__}"


def to_array(value: object, what: str) -> Array:
    """Convert a value to an array. TrainingError if its rows have different lengths."""
    try:
        return np.asarray(value)
    except ValueError as cause:
        raise TrainingError(f"{what} has rows of different lengths: {quoted(value)}; pad them to one length") from cause


def float_array(value: object, what: str, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """Copy a value into a new floating-point array. TrainingError for anything but numbers."""
    try:
        if value is None:
            raise TypeError("numpy converts None to NaN")
        return np.array(value, dtype)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TrainingError(f"{what} must be an array of numbers, not {quoted(value)}") from cause


def whole_number(name: str, value: object, minimum: int) -> int:
    """Convert a Python or numpy integer to an int. TrainingError unless it is a whole number ≥ `minimum`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise TrainingError(f"{name} must be a whole number ≥ {minimum}, not {value!r}")
    return int(value)
