"""Tensors of other libraries as values of onnxruntime: bound where they lie, or copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.runtime import buffers as ortvalue
from amp_rewrite.runtime.buffers import from_array, to_array


class Tensor:
    def __init__(self, kind: int, at: int) -> None:
        self.place = kind, at

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place


@pytest.mark.parametrize(
    ("kind", "at", "device", "index", "same"),
    [
        (1, 0, "cpu", 0, True),
        (1, 0, "cpu", 1, True),  # the CPU is one device
        (2, 0, "cuda", 0, True),
        (3, 1, "cuda", 1, True),
        (2, 0, "cuda", 1, False),
        (1, 0, "cuda", 0, False),
        (2, 0, "cpu", 0, False),
        (4, 0, "cuda", 0, False),
    ],
)
def test_a_tensor_is_bound_where_it_lies_or_copied(
    kind: int, at: int, device: str, index: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ortvalue, "copied", lambda ort, value, device, index: ("copied", value, device, index))
    ort: Any = SimpleNamespace(OrtValue=SimpleNamespace(from_dlpack=lambda tensor: "value"))
    expected = "value" if same else ("copied", "value", device, index)
    assert ortvalue.from_tensor(ort, Tensor(kind, at), device, index) == expected


def test_a_tensor_that_cannot_be_exported_is_refused_in_one_line() -> None:
    def refuse(tensor: object) -> None:
        raise RuntimeError("requires\n grad" + "x" * 300)

    ort: Any = SimpleNamespace(OrtValue=SimpleNamespace(from_dlpack=refuse))
    with pytest.raises(ModelError, match=r"^a tensor cannot be bound: requires gradx{187}; pass tensor\.detach\(\)"):
        ortvalue.from_tensor(ort, Tensor(1, 0), "cpu", 0)


class Elsewhere:
    """A value in the memory of a device."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def device_name(self) -> str:
        return "cuda"

    def element_type(self) -> int:
        return int(self.value.element_type())


def test_bits_of_types_that_numpy_lacks_are_copied_only_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(6, dtype=DType.BFLOAT16.numpy).reshape(2, 3)
    places: list[str] = []

    def copied(_: Any, value: Any, device: str, index: int = 0) -> Any:
        places.append(f"{device}:{index}")
        return getattr(value, "value", value)

    monkeypatch.setattr(ortvalue, "copied", copied)
    here = from_array(onnxruntime, array)
    assert to_array(onnxruntime, here).tolist() == array.tolist() and places == []
    from_array(onnxruntime, array, "cuda", 1)
    assert to_array(onnxruntime, Elsewhere(here)).tolist() == array.tolist()
    assert places == ["cuda:1", "cpu:0"]
