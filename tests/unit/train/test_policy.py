"""Policies: names and what they mean, plain forms, and the one that a process has."""

import warnings
from typing import Any

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.train import policy as policies
from amp_rewrite.train.keras.loss_scale_optimizer import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)
from amp_rewrite.train.policy import Policy, global_policy, policy_scope, set_policy
from amp_rewrite.train.step.step import training_step
from support.train.nets import CROSS_ENTROPY, fresh_process, mlp

F32, F16, BF16 = DType.FLOAT, DType.FLOAT16, DType.BFLOAT16


__all__ = ["fresh_process"]
pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.mark.parametrize(
    ("name", "types", "scale"),
    [
        ("mixed_float16", (F32, F16), "dynamic"),
        ("mixed_bfloat16", (F32, BF16), None),
        ("float32", (F32, F32), None),
        ("f16", (F16, F16), None),
        ("_infer", (None, None), None),
    ],
)
def test_a_policy_says_two_types_and_a_loss_scale(name: str, types: tuple[DType | None, ...], scale: str) -> None:
    policy = Policy(name)
    assert ((policy.param, policy.compute), policy.loss_scale) == (types, scale)


def test_a_name_that_is_no_policy_is_refused_and_spellings_of_one_are_equal() -> None:
    assert Policy("half") == Policy("float16")
    assert Policy("mixed_float16") != Policy("mixed_float16", loss_scale=8)
    with pytest.raises(TypeError, match=r"must be a string, not .*; for an element type use Policy\('float16'\)"):
        Policy(F16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a policy's name must be a string, not 3$"):
        Policy(3)  # type: ignore[arg-type]


def test_a_loss_scale_where_it_does_not_help_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match="^policy 'mixed_bfloat16' has a loss scale, but computes in bfloat16: "
    ) as said:
        assert Policy("mixed_bfloat16", loss_scale=2).loss_scale == 2.0
    assert said[0].filename == __file__  # of the caller


def test_a_policy_prints_as_in_keras() -> None:
    assert repr(Policy("float32")) == '<Policy "float32", loss_scale=None>'
    assert repr(Policy("float16", loss_scale=8)) == '<Policy "float16", loss_scale=FixedLossScale(8.0)>'
    assert repr(Policy("mixed_float16")) == (
        '<Policy "mixed_float16", loss_scale=DynamicLossScale(current_loss_scale=32768.0, num_good_steps=0,'
        " initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0)>"
    )


@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (Policy("_infer"), {"name": "_infer"}),
        (Policy("mixed_float16"), {"name": "mixed_float16"}),
        (Policy("mixed_float16", loss_scale=None), {"name": "mixed_float16", "loss_scale": None}),
        (Policy("float16", loss_scale=8), {"name": "float16", "loss_scale": 8.0}),
    ],
)
def test_a_policy_comes_back_from_its_configuration(policy: Policy, plain: dict[str, Any]) -> None:
    assert policy.get_config() == plain
    assert Policy.from_config(plain) == policy


# -- the process -------------------------------------------------------------------------------------


def test_the_policy_of_a_process_holds_until_withdrawn_and_a_scope_until_its_end() -> None:
    assert (global_policy(), policies.state.policy is not None) == (Policy("float32"), False)
    set_policy("mixed_float16")
    assert (global_policy(), policies.state.policy is not None) == (Policy("mixed_float16"), True)
    set_policy(None)
    assert (global_policy(), policies.state.policy is not None) == (Policy("float32"), False)
    set_policy("float64")
    with pytest.raises(ZeroDivisionError), policy_scope("mixed_bfloat16"):
        assert global_policy() == Policy("mixed_bfloat16")
        raise ZeroDivisionError
    assert global_policy() == Policy("float64")


def test_a_mixed_policy_and_the_rewrite_exclude_each_other_and_float64_is_allowed() -> None:
    policies.state.rewriting = True
    with pytest.raises(PolicyError) as error:
        set_policy("mixed_float16")
    assert str(error.value) == (
        "cannot set policy 'mixed_float16': the mixed precision graph rewrite is enabled, and only one of the two"
        " can be active; call disable_mixed_precision_graph_rewrite() first"
    )
    set_policy("float64")
    assert global_policy() == Policy("float64")


def test_a_gpu_that_gains_nothing_is_named_once_per_process_where_the_policy_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "machine_asked", lambda: Hardware((Gpu("P100", (6, 0)), Gpu("V100", (7, 0)))))
    set_policy("mixed_bfloat16")  # only float16 is asked about
    message = "this GPU has less: P100, compute capability 6.0$"
    with pytest.warns(UserWarning, match=message) as said:
        set_policy("mixed_float16")
    assert [warning.filename for warning in said] == [__file__]
    set_policy("mixed_float16")
    monkeypatch.setattr(policies, "state", policies.ProcessSettings())
    monkeypatch.setattr(policies, "machine_asked", lambda: Hardware(absence="no GPU"))
    with pytest.warns(UserWarning, match="^no GPU; on a CPU float16") as said, policy_scope("mixed_float16"):
        pass
    assert [warning.filename for warning in said] == [__file__]


def test_steps_follow_the_rewrite_and_the_policy_as_sessions_do() -> None:
    seen = [policies.policy_of_steps().name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a machine without a GPU
        enable_mixed_precision_graph_rewrite()
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)
        disable_mixed_precision_graph_rewrite()
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)
        set_policy("mixed_bfloat16")
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)

    assert seen == ["mixed_float16", "mixed_float16", "float32", "mixed_bfloat16"]
