"""State that goes round on the device: two sets, one read while the other is written."""

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime import buffers as ortvalue
from amp_rewrite.runtime.buffers import BufferedRunner, from_array, to_array
from amp_rewrite.runtime.runner import Runner, SessionOptions

F32 = np.float32
COUNTING = """<ir_version: 10, opset_import: ["": 20]>
net (float[N] x, float[2] s, float t) => (float[2] new_s, float[] new_t, float[] sum) {
  sum = ReduceSum <keepdims = 0> (x)
  new_s = Add (s, sum)
  new_t = Identity (t)
}"""


def opened(text: str, **state: object) -> BufferedRunner:
    runner = Runner.open(Model.load(onnx.parser.parse_model(text)), SessionOptions(pooled=False))
    buffer = runner.double_buffer({name: np.array(value, F32) for name, value in state.items()})
    return runner.buffered(buffer, {name: f"new_{name}" for name in state}, ["sum"])


def test_a_run_reads_one_side_and_writes_the_other_in_the_same_places() -> None:
    made = opened(COUNTING, s=[1, 2], t=5)
    seen = [float(made.run(side, {"x": np.array([3, 4], F32)})["sum"]) for side in (0, 1, 0)]

    assert seen == [7, 7, 7]
    assert {n: a.tolist() for n, a in made.buffer.arrays(0).items()} == {"s": [1 + 14, 2 + 14], "t": 5}
    assert {n: a.tolist() for n, a in made.buffer.arrays(1).items()} == {"s": [1 + 21, 2 + 21], "t": 5}
    made = opened(COUNTING, s=[1, 2], t=5)
    places = [value.data_ptr() for side in made.buffer.sides for value in side.values()]
    made.run(0, {"x": np.ones(1, F32)})

    assert len(set(places)) == 4
    assert made.buffer.arrays(0)["s"].tolist() == [1, 2]  # the side that was read is as it was
    assert places == [value.data_ptr() for side in made.buffer.sides for value in side.values()]


def test_inputs_may_change_their_size_and_their_arrays_may_be_used_again() -> None:
    made = opened(COUNTING, s=[0, 0], t=0)
    x = np.ones(4, F32)
    seen = []
    for size in (4, 2, 0, 3):
        seen.append(float(made.run(0, {"x": x[:size]})["sum"]))
        x *= 2

    assert seen == [4, 4, 0, 24]


def test_outputs_that_are_none_and_arrays_that_are_no_input_are_refused() -> None:
    runner = Runner.open(Model.load(onnx.parser.parse_model(COUNTING)))
    with pytest.raises(ModelError) as error:
        runner.buffered(runner.double_buffer({}), {}, ["loss"])
    assert str(error.value) == "the model has no output 'loss'; it has 'new_s', 'new_t', 'sum'"
    made = opened(COUNTING, s=[0, 0], t=0)
    with pytest.raises(ModelError) as error:
        made.run(0, {"s": np.zeros(2, F32)})
    assert str(error.value) == "'s' is not an input to feed; the inputs are x"


# -- tensors of other libraries as values of onnxruntime --


class Tensor:
    """A tensor of another library, on a GPU of a number."""

    def __init__(self, device: str, at: int) -> None:
        self.place = device, at

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 0, self.place[1]


class Value:
    """OrtValue, as far as its place goes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    from_dlpack = classmethod(lambda cls, tensor: cls(tensor))

    def device_name(self) -> str:
        return self.tensor.place[0]


@pytest.mark.parametrize(
    ("lies", "wanted", "same"),
    [
        (("cpu", 0), ("cpu", 0), True),
        (("Cuda", 1), ("cuda", 1), True),
        (("cuda", 0), ("cuda", 1), False),
        (("cpu", 0), ("cuda", 0), False),
        (("cuda", 0), ("cpu", 0), False),
    ],
)
def test_a_tensor_is_bound_where_it_lies_or_copied(
    lies: tuple[str, int], wanted: tuple[str, int], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ortvalue, "copied", lambda value, *place: place)
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    found = ortvalue.placed(Tensor(*lies), *wanted)
    assert isinstance(found, Value) if same else found == wanted


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

    def copied(value: Any, device: str, index: int = 0) -> Any:
        places.append(f"{device}:{index}")
        return getattr(value, "value", value)

    monkeypatch.setattr(ortvalue, "copied", copied)
    here = from_array(array)
    assert to_array(here).tolist() == array.tolist() and places == []
    from_array(array, "cuda", 1)
    assert to_array(Elsewhere(here)).tolist() == array.tolist()
    assert places == ["cuda:1", "cpu:0"]
