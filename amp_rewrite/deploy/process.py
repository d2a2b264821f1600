"""Process-wide settings: the precision policy, and the switch for conversion in new sessions.

This is the only global state of the package; `session` reads it. Errors, warnings and the order of effects are those
of TensorFlow 2.1 to 2.3: `enable_mixed_precision_graph_rewrite` (`train.keras`) and the policy exclude each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.runtime.gpu import refusal
from amp_rewrite.runtime.probes import machine_asked
from amp_rewrite.settings.policy import Policy


@dataclass(slots=True)
class ProcessSettings:
    """The settings. `policy`: None unless `set_policy` set one; `rewriting`: new sessions convert their models, None
    if the rewrite was never enabled; `plain_sessions`: number of sessions opened without conversion."""

    policy: Policy | None = None
    rewriting: bool | None = None
    plain_sessions: int = 0
    devices_checked: bool = False


state = ProcessSettings()


def global_policy() -> Policy:
    """Return the default policy; float32 unless changed by `set_policy`.

    Returns:
        The policy of the process.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.global_policy().name
        'float32'
    """
    return state.policy or Policy("float32")


def set_policy(policy: str | Policy | None) -> None:
    """Set the policy of the process. The first one in float16 warns if no GPU computes faster in it.

    Args:
        policy: a name or a Policy; None resets it.

    Raises:
        PolicyError: it has no floating compute type, or is mixed while the graph rewrite is enabled.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.set_policy("mixed_bfloat16")
        >>> amp_rewrite.set_policy(None)
    """
    _set(policy, blamed=3)


def _set(policy: str | Policy | None, blamed: int) -> None:
    chosen = None if policy is None else Policy.of(policy)
    if chosen is not None and not (chosen.compute and chosen.compute.floating):
        raise PolicyError(
            f"a policy for a whole process must compute in a floating type, but {chosen.name!r} does not; use"
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
        if advice := refusal(machine_asked(), DType.FLOAT16):
            warnings.warn(advice, UserWarning, stacklevel=blamed)


@contextmanager
def policy_scope(policy: str | Policy | None) -> Iterator[None]:
    """Set the policy of the process inside `with`, and restore the previous one.

    Args:
        policy: as `set_policy` takes it.

    Returns:
        A context manager.

    Example:
        >>> import amp_rewrite
        >>> with amp_rewrite.policy_scope("mixed_bfloat16"):
        ...     amp_rewrite.global_policy().name
        'mixed_bfloat16'
    """
    before = state.policy
    _set(policy, blamed=4)  # contextlib stands between
    try:
        yield
    finally:
        state.policy = before


def policy_of_sessions() -> Policy:
    """Return the default policy of sessions: mixed_float16 while the rewrite is on, else the policy of the process."""
    return Policy("mixed_float16") if state.rewriting else global_policy()


def policy_of_steps() -> Policy:
    """Return the default policy of training steps: mixed_float16, or that of sessions once a process has chosen one.

    Enabling or disabling the graph rewrite, and `set_policy`, are such choices.
    """
    chosen = state.policy is not None or state.rewriting is not None
    return policy_of_sessions() if chosen else Policy("mixed_float16")


def warn_of_plain_sessions() -> None:
    """Warn the caller's caller if sessions were opened before the rewrite was enabled."""
    if opened := state.plain_sessions:
        them = "1 session was" if opened == 1 else f"{opened} sessions were"
        warnings.warn(
            f"{them} opened before the mixed precision graph rewrite was enabled; what is open stays as it is: open a"
            " model again to convert it",
            UserWarning,
            stacklevel=3,
        )
