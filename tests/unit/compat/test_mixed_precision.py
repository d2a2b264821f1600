"""`amp_rewrite.compat.auto_convert_mixed_precision`: as few ops in float32 as the outputs need."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from amp_rewrite.compat import auto_convert_mixed_precision, auto_convert_mixed_precision_model_path
from unit.compat.test_float16 import FULL, HALF, io_types, model, weight_types

BATCH = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}


def always(expected: Sequence, tried: Sequence) -> bool:
    return True


def near(expected: Sequence, tried: Sequence) -> bool:
    return all(np.allclose(b, a, 0, 1e-6) for a, b in zip(expected, tried, strict=True))


@pytest.mark.parametrize(
    "bounds", [{"rtol": 0, "atol": 1e-6}, {"validate_fn": near}, {"validate_fn": always, "atol": 1e-6}]
)
def test_products_stay_float32_where_the_bound_needs_that(bounds: dict) -> None:
    half = auto_convert_mixed_precision(model(), BATCH, keep_io_types=True, **bounds)
    assert io_types(half) == [FULL, FULL]
    assert weight_types(half)["second"] == FULL


def test_validate_fn_sees_the_outputs_of_both_models_and_the_tolerance_counts_too() -> None:
    seen: list[tuple] = []

    def validate(expected: Sequence, tried: Sequence) -> bool:
        seen.append((expected, tried))
        return True

    half = auto_convert_mixed_precision(model(), BATCH, validate, rtol=0, atol=1e-6, keep_io_types=True)
    assert weight_types(half)["second"] == FULL
    assert all(len(expected) == len(tried) == 1 for expected, tried in seen)
    np.testing.assert_array_equal(seen[0][0][0], seen[0][1][0])  # the float32 model is judged first
    assert any(np.any(expected[0] != tried[0]) for expected, tried in seen)


def test_outputs_that_no_choice_brings_near_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"validation failed: .*keep_io_types=True"):
        auto_convert_mixed_precision(model(), BATCH, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"validation failed: .*keep_io_types=True"):
        auto_convert_mixed_precision(model(), BATCH, lambda a, b: a[0] is b[0] or np.array_equal(a[0], b[0]))
    with pytest.raises(ValueError, match=r"float32 model itself; fix validate_fn"):
        auto_convert_mixed_precision(model(), BATCH, lambda a, b: False)


CPU = ["CPUExecutionProvider"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    onnx.save(model(), tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


@pytest.mark.parametrize("location", [None, "weights.bin"])
def test_a_file_becomes_a_file_with_its_weights_beside_it(source: str, tmp_path: Path, location: str | None) -> None:
    target = tmp_path / "made" / "half.onnx"
    for _ in range(2):  # the second replaces the first
        auto_convert_mixed_precision_model_path(source, BATCH, str(target), CPU, location, rtol=0.05, atol=0.05)
    half = onnx.load(target)
    assert weight_types(half) == {"first": HALF, "second": HALF}
    assert io_types(half) == [FULL, FULL]
    assert {path.name for path in target.parent.iterdir()} == {"half.onnx", location or "fp16_tensor.data"}


def test_another_provider_and_verbose_are_warnings_at_the_line_of_the_caller(source: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as caught:
        auto_convert_mixed_precision_model_path(
            source, BATCH, tmp_path / "half.onnx", ["CUDAExecutionProvider"], None, always, verbose=True
        )
    assert [str(w.message).partition("=")[0] for w in caught] == ["provider", "verbose"]
    assert {w.filename for w in caught} == {__file__}


def test_the_bound_that_is_not_given_is_that_of_the_other_converter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[float, float]] = []
    made = SimpleNamespace(model="the model", save=lambda *_, **named: None)

    def repair(*_: object, **named: float) -> SimpleNamespace:
        asked.append((named["rtol"], named["atol"]))
        return SimpleNamespace(solved=True, converted=made)

    monkeypatch.setattr("amp_rewrite.compat.mixed_precision.repair", repair)
    for given in ({"rtol": 1e-2}, {"atol": 0.0}):
        assert auto_convert_mixed_precision(model(), BATCH, **given) == "the model"
        auto_convert_mixed_precision_model_path("m.onnx", BATCH, tmp_path / "a" / "half.onnx", CPU, **given)
    assert asked == [(1e-2, 1e-8), (1e-2, 1e-5), (1e-5, 0.0), (1e-3, 0.0)] and (tmp_path / "a").is_dir()
