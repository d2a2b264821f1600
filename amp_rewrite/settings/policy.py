"""Policies: the element types of parameters, arithmetic and results."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_rewrite.dtypes import MIXED, DType
from amp_rewrite.errors import PolicyError, TrainingError, advice

if TYPE_CHECKING:
    from amp_rewrite.settings.loss_scale import LossScale

_BY_NAME = "default"  # the loss scale that belongs to the name
_INFER, _OLD = "_infer", "_float32_vars"


@dataclass(frozen=True, repr=False)
class Policy:
    """Element types of parameters, arithmetic and results; models, training and settings share the class.

    A name is "mixed_float16" or "mixed_bfloat16" (float32 parameters and results, arithmetic in the low type), or an
    element type ("float16", "f32" … for all three). "_infer" has no types: everything stays as it is. Names, defaults,
    errors and the warning are those of Keras in TensorFlow 2.1 to 2.3. Keras checks a policy when it makes a layer;
    here the function that takes the policy checks it. The attribute `loss_scale` is None or a `LossScale`, equal to
    its short form.

    Args:
        name: the types.
        loss_scale: None, "dynamic", a number ≥ 1 or a `LossScale`; by default "dynamic" for mixed_float16, else None.

    Raises:
        PolicyError: the name is unknown.
        TypeError: the name is not a string.

    Example:
        >>> import amp_rewrite
        >>> policy = amp_rewrite.Policy("mixed_float16")
        >>> policy.compute_dtype, policy.variable_dtype, policy.loss_scale == "dynamic"
        ('float16', 'float32', True)
    """

    name: str
    loss_scale: Any = _BY_NAME

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            hint = f"; for an element type use Policy({self.name.spelling!r})" if isinstance(self.name, DType) else ""
            raise TypeError(f"a policy's name must be a string, not {self.name!r}{hint}")
        preset = self.mixed or self.name == _INFER
        object.__setattr__(self, "name", self.name if preset else _element_type(self.name).spelling)
        by_name = isinstance(self.loss_scale, str) and self.loss_scale == _BY_NAME
        scale = _scale_of(_usual_scale(self.name) if by_name else self.loss_scale)
        object.__setattr__(self, "loss_scale", scale)
        if scale is not None and self.compute is not DType.FLOAT16:
            # the caller of the dataclass's generated __init__
            low = self.compute_dtype or "the types of the model"
            warnings.warn(
                f"policy {self.name!r} has a loss scale, but computes in {low}: loss scaling only helps float16, whose"
                " small gradients vanish",
                UserWarning,
                stacklevel=3,
            )

    @property
    def mixed(self) -> bool:
        """True if parameters and arithmetic are of different types."""
        return self.name in MIXED

    @property
    def param(self) -> DType | None:
        """Type of stored parameters and of a model's results; None for "_infer"."""
        if self.name == _INFER:
            return None
        return DType.FLOAT if self.mixed else DType.parse(self.name)

    @property
    def compute(self) -> DType | None:
        """Type of the arithmetic; None for "_infer"."""
        return MIXED.get(self.name) or self.param

    @property
    def compute_dtype(self) -> str | None:
        """Name of the type of the arithmetic, as in Keras; None for "_infer"."""
        return self.compute and self.compute.spelling

    @property
    def variable_dtype(self) -> str | None:
        """Name of the type of stored parameters, as in Keras; None for "_infer"."""
        return self.param and self.param.spelling

    @property
    def lowers(self) -> DType | None:
        """Low type of a conversion under this policy; None if it lowers no op."""
        return self.compute if self.compute is not None and self.compute.low else None

    def __repr__(self) -> str:
        return f'<Policy "{self.name}", loss_scale={self.loss_scale!r}>'

    def get_config(self) -> dict[str, Any]:
        """Return the argument of `from_config` for an equal policy: the name, and an unusual loss scale."""
        from amp_rewrite.settings.loss_scale import spec  # late: most policies are read without numpy

        usual = self.loss_scale == _usual_scale(self.name)
        return {"name": self.name} if usual else {"name": self.name, "loss_scale": spec(self.loss_scale)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Policy:
        """Return the policy of a `get_config` result.

        Raises:
            PolicyError: a key is unknown.
        """
        if not {"name"} <= config.keys() <= {"name", "loss_scale"}:
            raise PolicyError(f"not a policy's configuration: {config!r}; it has `name` and may have `loss_scale`")
        return cls(**config)

    @classmethod
    def of(cls, policy: str | Policy | None) -> Policy:
        """Return a policy, from a policy or its name; None is float32."""
        return policy if isinstance(policy, Policy) else cls("float32" if policy is None else policy)


def serialize(policy: Policy) -> str | dict[str, Any] | None:
    """Return the shortest plain form: None for "_infer", the name of an element type, or Keras's class dictionary."""
    if policy.name == _INFER:
        return None
    plain = not policy.mixed and policy.loss_scale is None
    return policy.name if plain else {"class_name": "Policy", "config": policy.get_config()}


def deserialize(config: str | dict[str, Any] | None) -> Policy:
    """Return the policy of a `serialize` result. PolicyError for other values."""
    if config is None or isinstance(config, str):
        return Policy(config or _INFER)
    inner = config.get("config") if isinstance(config, dict) and config.get("class_name") == "Policy" else None
    if not isinstance(inner, dict):
        raise PolicyError(f"not a serialized policy: {config!r}; use what serialize gave")
    return Policy.from_config(inner)


def _element_type(name: str) -> DType:
    if name.endswith(_OLD):
        mixed = f"mixed_{name.removesuffix(_OLD)}"
        raise PolicyError(f"policies no longer end in {_OLD!r}; use {mixed!r} instead of {name!r}")
    try:
        return DType.parse(name)
    except PolicyError:
        legal = "mixed_float16, mixed_bfloat16 or an element type such as float32"
        raise PolicyError(f"unknown policy {name!r}; {advice(name, MIXED, f'use {legal}')}") from None


def _usual_scale(name: str) -> str | None:
    return "dynamic" if name == "mixed_float16" else None


def _scale_of(given: object) -> LossScale | None:
    from amp_rewrite.settings import loss_scale  # late: as above

    try:
        return loss_scale.get(given)
    except TrainingError as cause:
        raise PolicyError(str(cause)) from cause
