"""Policies: the element types of parameters, arithmetic and results."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, TrainingError, advice, spelled

if TYPE_CHECKING:
    import numpy as np

    from amp_rewrite.settings.loss_scale import LossScale

_BY_NAME = "default"  # the loss scale that belongs to the name


class TypeName(str):
    """The name of an element type, with the attributes of its `DType`; equal to both."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        return getattr(DType.parse(str(self)), name)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other.spelling if isinstance(other, DType) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(frozen=True, repr=False)
class Policy:
    """Element types of parameters, arithmetic and results; models, training and settings share the class.

    A name is "mixed_float16" or "mixed_bfloat16" (float32 parameters and results, arithmetic in the low type), an
    element type ("float16", "f32" … for all three), or all three spelled out ("p=f32,c=f16,o=f32"; `p` and `o`
    are float32 if left out). "_infer" has no types: everything stays as it is.

    Equal spellings are equal policies: "p=f32,c=f16,o=f32" is mixed_float16. Names, defaults, errors and the
    warning are those of Keras in TensorFlow 2.1 to 2.3. Keras checks a policy when it makes a layer; here the function
    that takes the policy checks it. The attribute `loss_scale` is None or a `LossScale`, equal to its short form.

    Args:
        name: the types.
        loss_scale: None, "dynamic", a number ≥ 1 or a `LossScale`; by default "dynamic" for mixed_float16, else None.

    Raises:
        PolicyError: the name is unknown.
        TypeError: the name is not a string.

    Example:
        >>> import amp_rewrite
        >>> policy = amp_rewrite.Policy("mixed_float16")
        >>> policy.compute_dtype.spelling, policy.variable_dtype.spelling
        ('float16', 'float32')
        >>> policy.compute_dtype == "float16", policy.loss_scale == "dynamic"
        (True, True)
    """

    name: str
    loss_scale: Any = _BY_NAME

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            hint = f"; for an element type use Policy({self.name.spelling!r})" if isinstance(self.name, DType) else ""
            raise TypeError(f"a policy's name must be a string, not {self.name!r}{hint}")
        object.__setattr__(self, "name", _spelling(_types(self.name)))
        by_name = isinstance(self.loss_scale, str) and self.loss_scale == _BY_NAME
        scale = _scale_of(_usual_scale(self.name) if by_name else self.loss_scale)
        object.__setattr__(self, "loss_scale", scale)
        if scale is not None and self.compute is not DType.FLOAT16:
            # the caller of the dataclass's generated __init__
            warnings.warn(
                f"policy {self.name!r} has a loss scale, but computes in {_spelled(self.compute)}: loss scaling only"
                " helps float16, whose small gradients vanish",
                UserWarning,
                stacklevel=3,
            )

    @property
    def param(self) -> DType | None:
        """Type of stored parameters; None for "_infer"."""
        return _types(self.name)[0]

    @property
    def compute(self) -> DType | None:
        """Type of the arithmetic; None for "_infer"."""
        return _types(self.name)[1]

    @property
    def output(self) -> DType | None:
        """Type of a model's results; None for "_infer"."""
        return _types(self.name)[2]

    @property
    def compute_dtype(self) -> TypeName | None:
        """Name of the type of the arithmetic, as in Keras; None for "_infer"."""
        return None if self.compute is None else TypeName(self.compute.spelling)

    @property
    def variable_dtype(self) -> TypeName | None:
        """Name of the type of stored parameters, as in Keras; None for "_infer"."""
        return None if self.param is None else TypeName(self.param.spelling)

    @property
    def mixed(self) -> bool:
        """True if parameters and arithmetic are of different types."""
        return self.param is not self.compute

    @property
    def lowers(self) -> DType | None:
        """Low type of a conversion under this policy; None if it lowers no op."""
        return self.compute if self.compute is not None and self.compute.low else None

    should_cast_variables = mixed  # Keras's word

    def __repr__(self) -> str:
        return f'<Policy "{self.name}", loss_scale={self.loss_scale!r}>'

    def get_config(self) -> dict[str, Any]:
        """Return the argument of `from_config` for an equal policy: the name, and an unusual loss scale."""
        config: dict[str, Any] = {"name": self.name}
        if self.loss_scale != _usual_scale(self.name):
            config["loss_scale"] = _spec(self.loss_scale)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Policy:
        """Return the policy of a `get_config` result.

        Raises:
            PolicyError: a key is unknown.
        """
        unknown = sorted(config.keys() - {"name", "loss_scale"})
        if unknown or "name" not in config:
            raise PolicyError(f"not a policy's configuration: {config!r}; it has `name` and may have `loss_scale`")
        return cls(**config)

    @classmethod
    def of(cls, policy: str | Policy | None) -> Policy:
        """Return a policy, from a policy or its name; None is float32."""
        return policy if isinstance(policy, Policy) else cls("float32" if policy is None else policy)


def low_type(to: object) -> DType:
    """Return the low type of a conversion: a type in a form of `DType.parse`, or the arithmetic of a policy.

    A text may be a policy's name, too ("mixed_float16", "p=f32,c=f16,o=f32"). PolicyError for what is neither type nor
    policy, for a type that is not low, and for a policy that lowers nothing or whose results are low.
    """
    if not isinstance(to, Policy):
        named = isinstance(to, str) and (to.strip().startswith("mixed_") or "=" in to)
        try:
            to = Policy(str(to).strip()) if named else DType.parse(to)
        except PolicyError:
            hint = advice(to.strip().lower(), _LOW_NAMES, _LOW_FORMS) if isinstance(to, str) else _LOW_FORMS
            raise PolicyError(f"unknown type or policy {to!r}; {hint}") from None
    if isinstance(to, Policy):
        if to.lowers is None:
            raise PolicyError(f"policy {to.name!r} lowers nothing; use mixed_float16 or mixed_bfloat16")
        if to.output is not DType.FLOAT:
            raise PolicyError(
                f"policy {to.name!r} does not keep results in float32; use mixed_{to.lowers.spelling}, and"
                f" {spelled('io', 'low')} for low inputs and outputs"
            )
        return to.lowers
    if not to.low:
        raise PolicyError(f"cannot lower to {to.spelling}; use float16 or bfloat16")
    return to


LowName = Literal["float16", "fp16", "f16", "half", "bfloat16", "bf16", "mixed_float16", "mixed_bfloat16"]
"""Words for a low type, for static checkers."""


class TorchType(Protocol):
    """A torch.dtype, known without torch."""

    @property
    def is_floating_point(self) -> bool:
        """True for floating types."""


LowType: TypeAlias = "LowName | int | DType | Policy | type[np.generic] | np.dtype[Any] | TorchType"
"""Forms of a low type; an int is a `TensorProto.DataType` code."""
_LOW_NAMES: tuple[str, ...] = get_args(LowName)
_LOW_FORMS = "use float16 (f16, fp16, half), bfloat16 (bf16), mixed_float16, mixed_bfloat16, or p=f32,c=f16,o=f32"


def serialize(policy: Policy) -> str | dict[str, Any] | None:
    """Return the shortest plain form: None for "_infer", the name of an element type, else Keras's class dictionary."""
    if policy.name == _INFER:
        return None
    if policy.param is policy.compute is policy.output and policy.loss_scale is None:
        return policy.name
    return {"class_name": "Policy", "config": policy.get_config()}


def deserialize(config: str | dict[str, Any] | None) -> Policy:
    """Return the policy of a `serialize` result. PolicyError for other values."""
    if config is None:
        return Policy(_INFER)
    if isinstance(config, str):
        return Policy(config)
    inner = config.get("config") if isinstance(config, dict) else None
    if not isinstance(inner, dict) or config.get("class_name") != "Policy":
        raise PolicyError(f"not a serialized policy: {config!r}; use what serialize gave")
    return Policy.from_config(inner)


_INFER = "_infer"
Types = tuple[DType | None, DType | None, DType | None]
_PRESETS: dict[str, Types] = {
    "mixed_float16": (DType.FLOAT, DType.FLOAT16, DType.FLOAT),
    "mixed_bfloat16": (DType.FLOAT, DType.BFLOAT16, DType.FLOAT),
    _INFER: (None, None, None),
}
_PART = re.compile(r"\s*(p|param|params|c|compute|o|output)\s*=\s*(\w+)\s*")
_OLD = "_float32_vars"


def _types(name: str) -> Types:
    if name in _PRESETS:
        return _PRESETS[name]
    if name.endswith(_OLD):
        stem = name.removesuffix(_OLD)
        raise PolicyError(f"policies no longer end in {_OLD!r}; use 'mixed_{stem}' instead of {name!r}")
    if "=" not in name:
        try:
            return (DType.parse(name),) * 3
        except PolicyError:
            raise _unknown(name) from None
    types: dict[str, DType] = {}
    for part in name.split(","):
        match = _PART.fullmatch(part)
        if match is None or match[1][0] in types:
            raise _unknown(name)
        types[match[1][0]] = DType.parse(match[2])
    if "c" not in types:
        raise PolicyError(f"policy {name!r} does not say what to compute in; add c=float16 or another type")
    return types.get("p", DType.FLOAT), types["c"], types.get("o", DType.FLOAT)


def _spelling(types: Types) -> str:
    preset = next((name for name, known in _PRESETS.items() if known == types), None)
    parts = [_spelled(dtype) for dtype in types]
    return preset or (parts[0] if len(set(parts)) == 1 else "p={},c={},o={}".format(*parts))


def _unknown(name: str) -> PolicyError:
    legal = "mixed_float16, mixed_bfloat16, an element type such as float32, or p=f32,c=f16,o=f32"
    return PolicyError(f"unknown policy {name!r}; use {legal}")


def _usual_scale(name: str) -> str | None:
    return "dynamic" if name == "mixed_float16" else None


def _scale_of(given: object) -> LossScale | None:
    from amp_rewrite.settings import loss_scale  # late: most policies are read without numpy

    if given is None or isinstance(given, loss_scale.LossScale):
        return given
    plain = isinstance(given, Real) and not isinstance(given, bool)
    number = plain and 1 <= float(given) < math.inf  # type: ignore[arg-type]
    try:
        if number or given == "dynamic" or isinstance(given, dict):
            return loss_scale.get(given)
    except TrainingError as cause:
        raise PolicyError(str(cause)) from cause
    raise PolicyError(f"invalid loss scale {given!r}; use None, 'dynamic' or a finite number ≥ 1")


def _spec(scale: LossScale | None) -> Any:
    from amp_rewrite.settings import loss_scale  # late: as above

    return loss_scale.spec(scale)


def _spelled(dtype: DType | None) -> str:
    return dtype.spelling if dtype is not None else "the types of the model"
