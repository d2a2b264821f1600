"""Loss scales on the host: TensorFlow's published sequences, values, configurations and refusals."""

from typing import Any

import numpy as np
import pytest

from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train.loss_scale import DynamicLossScale, FixedLossScale, IndexedSlices, serialize

MAX = float(np.finfo(np.float32).max)
pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite at the minimum loss scale")

# Flags of finite steps, (initial, period, multiplier), the scale after each step. From TensorFlow's own tests
# (mixed_precision/experimental/loss_scale_test.py of 2.3), confirmed by running TensorFlow.
SEQUENCES = {
    "grows every second step": ("TTTTTT", (1, 2, 2), [1, 2, 2, 4, 4, 8]),
    "stays at the largest float32": ("TTTTTT", (MAX / 4, 2, 2), [MAX / 4, MAX / 2, MAX / 2, MAX, MAX, MAX]),
    "halves on each overflow": ("FFFFFF", (1024, 2000, 2), [512, 256, 128, 64, 32, 16]),
    "never goes below 1": ("FFFFFF", (16, 2000, 2), [8, 4, 2, 1, 1, 1]),
    "an overflow ends a run": ("TTTFT", (1, 2, 2), [1, 2, 2, 1, 1]),
    "grows again after an overflow": ("TTTFTT", (1, 1, 2), [2, 4, 8, 4, 8, 16]),
    "goes up and down": ("TFTFTFTFT", (1, 1, 2), [2, 1, 2, 1, 2, 1, 2, 1, 2]),
    "single finite steps do not add up": ("TFTFTFT", (32, 2, 2), [32, 16, 16, 8, 8, 4, 4]),
    "another multiplier": ("TTFTT", (4, 2, 3), [4, 12, 4, 4, 12]),
    "a mixed run": ("FTTTFTFTTTF", (4, 2, 2), [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_dynamic_scale_follows_the_published_sequence(name: str) -> None:
    flags, settings, expected = SEQUENCES[name]
    scale = DynamicLossScale(*settings)
    seen = []
    for flag in flags:
        gradient = np.array([0.0 if flag == "T" else np.inf], np.float32)
        assert scale.update([gradient]) == (None, flag == "T")
        seen.append(float(scale()))

    assert seen == [float(np.float32(value)) for value in expected]


def test_a_dynamic_scale_starts_at_2_to_the_15_and_grows_after_2000_finite_steps() -> None:
    scale = DynamicLossScale()
    states = []
    for _ in range(2000):
        scale.update([np.float32(0)])
        states.append(float(scale()))

    assert (states[0], states[-2], states[-1]) == (32768.0, 32768.0, 65536.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_nonfinite_element_anywhere_spoils_a_step(bad: float) -> None:
    nest: Any = {"a": [np.ones(3), None], "b": (np.array([1, 2, bad], np.float16),)}

    assert not scales.all_finite(nest)
    assert not scales.all_finite(IndexedSlices(np.array([bad]), np.array([0])))


def test_none_is_ignored_and_of_sparse_gradients_the_values_count() -> None:
    assert scales.all_finite([None, None])
    assert scales.all_finite(IndexedSlices(np.array([1.0]), np.array([7]), (9,)))


def test_a_fixed_scale_lets_every_step_pass_even_nan() -> None:
    scale = FixedLossScale(1024)

    assert scale.update([np.array(np.nan)]) == (None, True)
    assert (scale(), scale().dtype, repr(scale)) == (1024.0, np.float32, "FixedLossScale(1024.0)")


def test_get_accepts_every_spelling_and_returns_copies() -> None:
    dynamic = scales.get("dynamic")
    assert isinstance(dynamic, DynamicLossScale) and scales.get(dynamic) is dynamic
    assert scales.get(8) == FixedLossScale(8.0)
    assert scales.get(None) is None
    assert scales.get(serialize(FixedLossScale(3))) == FixedLossScale(3.0)
    scale = DynamicLossScale(4)
    read = scale()
    read += 1

    assert (scale(), scale().dtype, scale().shape) == (4.0, np.float32, ())


def test_a_scale_round_trips_through_its_configuration_in_its_initial_state() -> None:
    scale = DynamicLossScale(8, 3, 4.0)
    scale.update([np.array(np.inf)])
    again = scales.deserialize(serialize(scale))

    assert scale() == 2.0 and again() == 8.0 and "current_loss_scale=2.0" in repr(scale)
    assert again.get_config() == {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0}


@pytest.mark.torch
@pytest.mark.parametrize("settings", [(1024.0, 2.0, 0.5, 3), (12345.0, 1.1, 0.7, 1)])
def test_growth_and_backoff_follow_the_scales_of_pytorch(settings: tuple[float, float, float, int]) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.amp.GradScaler("cpu", *settings)
    ours = DynamicLossScale.of_grad_scaler(*settings)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen = []
    for flag in "TTTTTFTTFTTTTTTFTTT":
        theirs.scale(parameter.sum() * (1 if flag == "T" else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update([np.array([0.0 if flag == "T" else np.inf])])
        seen.append((float(ours()), theirs.get_scale()))

    assert [own for own, _ in seen] == [other for _, other in seen]
    assert len({own for own, _ in seen}) > 2


def test_a_backoff_factor_is_checked_and_omitted_if_it_is_the_default() -> None:
    scale = DynamicLossScale(4.0, backoff_factor=0.3)
    again = scales.deserialize(serialize(scale))

    assert again == scale != DynamicLossScale(4.0)
    assert "backoff_factor" not in DynamicLossScale().get_config()


def test_a_scale_below_1_needs_a_lower_minimum_and_warns_once_at_it() -> None:
    scale = DynamicLossScale(2.0, 2000, minimum=0.25)
    with pytest.warns(UserWarning, match=r"^gradients are not finite at the minimum loss scale 0.25") as seen:
        values = [scale.update([np.full(1, np.inf)]) and float(scale()) for _ in range(6)]
    assert values == [1, 0.5, 0.25, 0.25, 0.25, 0.25] and len(seen) == 1
    assert scales.get(serialize(scale)).get_config() == scale.get_config()  # type: ignore[union-attr]
    assert DynamicLossScale.of_grad_scaler().minimum < 1e-37 < 1 == DynamicLossScale().minimum
    assert "minimum" not in DynamicLossScale().get_config()
