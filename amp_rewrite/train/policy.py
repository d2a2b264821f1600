"""Policies (the element types of parameters, arithmetic and results) and the process-wide settings.

The process-wide settings are the only global state of the package; sessions and training steps read them. Names,
errors, warnings and the order of effects follow Keras in TensorFlow 2.1 to 2.3. A mixed policy and
`enable_mixed_precision_graph_rewrite` (in `train.keras`) are mutually exclusive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from amp_rewrite.dtypes import MIXED, DType
from amp_rewrite.errors import PolicyError, TrainingError, advice
from amp_rewrite.runtime.gpu import why_not_fast
from amp_rewrite.runtime.probes import query_hardware
from amp_rewrite.train import loss_scale as scales

_BY_NAME = "default"  # the policy's name determines the loss scale
_INFER, _OLD_SUFFIX = "_infer", "_float32_vars"


@dataclass(frozen=True, repr=False)
class Policy:
    """Element types of parameters, arithmetic and results, for conversions, training and the process-wide settings.

    The name is "mixed_float16" or "mixed_bfloat16" (float32 parameters and results, arithmetic in the low type), or an
    element type for all three, such as "float16" or "f32". "_infer" changes no types. Names, defaults, errors and the
    warning follow Keras in TensorFlow 2.1 to 2.3. Keras checks a policy when it creates a layer; here, the
    function that takes the policy checks it. The attribute `loss_scale` is None or a `LossScale`, which compares
    equal to its short form ("dynamic" or a number).

    Args:
        name: name of the policy.
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
        if self.name.endswith(_OLD_SUFFIX):
            mixed = f"mixed_{self.name.removesuffix(_OLD_SUFFIX)}"
            raise PolicyError(f"policy names no longer end in {_OLD_SUFFIX!r}; use {mixed!r} instead of {self.name!r}")
        try:
            if not self.mixed and self.name != _INFER:
                object.__setattr__(self, "name", DType.parse(self.name).spelling)
        except PolicyError:
            legal = "use mixed_float16, mixed_bfloat16 or an element type such as float32"
            raise PolicyError(f"unknown policy {self.name!r}; {advice(self.name, MIXED, legal)}") from None
        by_name = isinstance(self.loss_scale, str) and self.loss_scale == _BY_NAME
        try:
            scale = scales.get(_default_scale(self.name) if by_name else self.loss_scale)
        except TrainingError as cause:
            raise PolicyError(str(cause)) from cause
        object.__setattr__(self, "loss_scale", scale)
        if scale is not None and self.compute is not DType.FLOAT16:
            # stacklevel 3 is the caller of the generated __init__
            low = self.compute_dtype or "the model's types"
            warnings.warn(
                f"policy {self.name!r} has a loss scale, but computes in {low}; loss scaling only helps float16, where"
                " small gradients vanish, so pass loss_scale=None",
                UserWarning,
                stacklevel=3,
            )

    @property
    def mixed(self) -> bool:
        """True if parameters and arithmetic have different types."""
        return self.name in MIXED

    @property
    def param(self) -> DType | None:
        """Type of stored parameters and of results; None for "_infer"."""
        if self.name == _INFER:
            return None
        return DType.FLOAT if self.mixed else DType.parse(self.name)

    @property
    def compute(self) -> DType | None:
        """Type of the arithmetic; None for "_infer"."""
        return MIXED.get(self.name) or self.param

    @property
    def compute_dtype(self) -> str | None:
        """Name of the arithmetic's type, as in Keras; None for "_infer"."""
        return self.compute and self.compute.spelling

    @property
    def variable_dtype(self) -> str | None:
        """Name of the stored parameters' type, as in Keras; None for "_infer"."""
        return self.param and self.param.spelling

    @property
    def lowers(self) -> DType | None:
        """Low type of a conversion under this policy; None if it lowers no op."""
        return self.compute if self.compute is not None and self.compute.low else None

    def __repr__(self) -> str:
        return f'<Policy "{self.name}", loss_scale={self.loss_scale!r}>'

    def get_config(self) -> dict[str, Any]:
        """Return the configuration for `from_config`: the name, and the loss scale unless it is the default."""
        is_default = self.loss_scale == _default_scale(self.name)
        return {"name": self.name} if is_default else {"name": self.name, "loss_scale": scales.spec(self.loss_scale)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Policy:
        """Return a new policy from a `get_config` result.

        Raises:
            PolicyError: a key is unknown.
        """
        if not {"name"} <= config.keys() <= {"name", "loss_scale"}:
            raise PolicyError(f"{config!r} is not a policy configuration; it needs `name`, and may have `loss_scale`")
        return cls(**config)

    @classmethod
    def of(cls, policy: str | Policy | None) -> Policy:
        """Return a Policy unchanged, or create one from its name; None means float32."""
        return policy if isinstance(policy, Policy) else cls("float32" if policy is None else policy)


def _default_scale(name: str) -> str | None:
    return "dynamic" if name == "mixed_float16" else None


# -- the process -------------------------------------------------------------------------------------


@dataclass(slots=True)
class ProcessSettings:
    """Process-wide settings.

    `policy`: None unless `set_policy` set one. `rewriting`: True if new sessions convert their models; None if the
    rewrite was never enabled. `plain_sessions`: number of sessions opened without a conversion. `devices_checked`:
    True after the check for devices with slow float16.
    """

    policy: Policy | None = None
    rewriting: bool | None = None
    plain_sessions: int = 0
    devices_checked: bool = False


state = ProcessSettings()


def global_policy() -> Policy:
    """Return the policy of the process: float32 unless `set_policy` changed it.

    Returns:
        The policy of the process.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.global_policy().name
        'float32'
    """
    return state.policy or Policy("float32")


def set_policy(policy: str | Policy | None) -> None:
    """Set the policy of the process. The first float16 policy warns if no GPU computes faster in float16.

    Args:
        policy: a name or a Policy; None resets it.

    Raises:
        PolicyError: the policy has no floating-point compute type, or is mixed while the graph rewrite is enabled.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.set_policy("mixed_bfloat16")
        >>> amp_rewrite.set_policy(None)
    """
    _set(policy, stacklevel=3)


def _set(policy: str | Policy | None, stacklevel: int) -> None:
    chosen = None if policy is None else Policy.of(policy)
    if chosen is not None and not (chosen.compute and chosen.compute.floating):
        raise PolicyError(
            f"the policy of a process must compute in a floating-point type, but {chosen.name!r} does not; use"
            " mixed_float16, mixed_bfloat16 or float32"
        )
    if chosen is not None and chosen.mixed and state.rewriting:
        raise PolicyError(
            f"cannot set policy {chosen.name!r}: the mixed precision graph rewrite is enabled, and only one of the two"
            " can be active; call disable_mixed_precision_graph_rewrite() first"
        )
    state.policy = chosen
    if chosen is not None and chosen.compute is DType.FLOAT16 and not state.devices_checked:
        state.devices_checked = True
        if advice := why_not_fast(query_hardware(), DType.FLOAT16):
            warnings.warn(advice, UserWarning, stacklevel=stacklevel)


@contextmanager
def policy_scope(policy: str | Policy | None) -> Iterator[None]:
    """Set the policy of the process inside a `with` block, then restore the previous one.

    Args:
        policy: as for `set_policy`.

    Returns:
        A context manager.

    Example:
        >>> import amp_rewrite
        >>> with amp_rewrite.policy_scope("mixed_bfloat16"):
        ...     amp_rewrite.global_policy().name
        'mixed_bfloat16'
    """
    before = state.policy
    _set(policy, stacklevel=4)  # contextlib adds one frame
    try:
        yield
    finally:
        state.policy = before


def policy_of_sessions() -> Policy:
    """Return the default policy of sessions: mixed_float16 while the rewrite is on, otherwise that of the process."""
    return Policy("mixed_float16") if state.rewriting else global_policy()


def policy_of_steps() -> Policy:
    """Return the default policy of training steps: mixed_float16 unless the process has chosen a policy.

    A process chooses with `set_policy`, or by enabling or disabling the graph rewrite; steps then follow sessions.
    """
    chosen = state.policy is not None or state.rewriting is not None
    return policy_of_sessions() if chosen else Policy("mixed_float16")
