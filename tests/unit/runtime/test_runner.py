"""Opening and running models: names, types, weights in files, providers, and errors of onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite import Model, ModelError
from amp_rewrite.dtypes import DType
from amp_rewrite.files import tensors, wire
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.runtime import buffers
from amp_rewrite.runtime.buffers import BufferedRunner, from_array, to_array
from amp_rewrite.runtime.faults import FAULTS
from amp_rewrite.runtime.ports import Port, written_to
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_works
from support.paths import TESTS

X = np.float32([[1, 2, 3], [4, 5, 6]])


def parsed(graph: str, opset: int = 20, ir: int = 10) -> Model:
    return Model.load(onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {graph}'))


def heavy() -> onnx.ModelProto:
    """Build y = x @ w with a known w of 64 KiB."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 128]) for name in "xy")
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([product], "g", [x], [y], [numpy_helper.from_array(WEIGHT, "w")])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


WEIGHT = np.random.default_rng(5).standard_normal((128, 128)).astype(np.float32)
ROW = np.random.default_rng(6).standard_normal((1, 128)).astype(np.float32)
# A product of 128 terms in another order: at most 128 roundings of the largest partial sum, about 60.
CLOSE = 128 * 2.0**-24 * 60


# -- ports ---------------------------------------------------------------------------------------------


def test_a_runner_lists_its_inputs_and_outputs() -> None:
    runner = Runner.open(
        parsed("""g (float[n, 3] x, float[3] w, seq(int64[2]) s, optional(float[1]) o)
            => (float[n, 3] y, int64 k, seq(int64[2]) t, bool h) <float[3] w = {1, 2, 3}> {
            y = Mul (x, w)
            k = SequenceLength (s)
            t = Identity (s)
            h = OptionalHasElement (o)
        }""")
    )
    assert runner.inputs == (
        Port("x", DType.FLOAT, "tensor", ("n", 3), True),
        Port("w", DType.FLOAT, "tensor", (3,), False),
        Port("s", DType.INT64, "seq", (2,), True),
        Port("o", DType.FLOAT, "optional", (1,), True),
    )
    assert runner.outputs == (
        Port("y", DType.FLOAT, "tensor", ("n", 3)),
        Port("k", DType.INT64, "tensor", ()),
        Port("t", DType.INT64, "seq", (2,)),
        Port("h", DType.BOOL, "tensor", ()),
    )
    assert runner.provider == CPU


# -- running -------------------------------------------------------------------------------------------


TWO = "g (float[2, 3] x) => (float[2, 3] y, float[2, 3] z) { y = Neg(x) z = Add(x, x) }"


def same(found: dict[str, object], expected: dict[str, object]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_outputs_are_returned_by_name_and_defaults_are_optional() -> None:
    runner = Runner.open(parsed(TWO))
    same(runner.run({"x": X}), {"y": -X, "z": X + X})
    same(runner.run({"x": X}, ["z"]), {"z": X + X})
    same(runner.run({"x": X}, ["z", "y"]), {"z": X + X, "y": -X})
    assert runner.run({"x": X}, []) == {}
    runner = Runner.open(parsed("g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {3, 4}> { y = Mul(x, w) }"))
    ones = np.ones(2, np.float32)
    same(runner.run({"x": ones}), {"y": np.float32([3, 4])})
    same(runner.run({"x": ones, "w": ones}), {"y": ones})


def test_only_the_part_behind_the_requested_outputs_is_opened() -> None:
    """The other output cannot be computed, because its op is unknown."""
    model = parsed("""g (float[2, 3] x, bool c) => (float[2, 3] y, float[2, 3] z) {
        y = Neg (x)
        two = Add (x, x)
        z = If (c) <
          then_branch = t () => (float[2, 3] a) { a = Neg (two) },
          else_branch = e () => (float[2, 3] b) { b = Identity (two) }
        >
    }""")
    model.proto.graph.node[0].domain = "far"
    model.proto.opset_import.add(domain="far", version=1)
    with pytest.raises(ModelError, match=r"^onnxruntime cannot open the model: .*far"):
        Runner.open(model)
    runner = Runner.open(model, SessionOptions(outputs=["z"]))
    assert [port.name for port in runner.outputs] == ["z"]
    same(runner.run({"x": X, "c": np.array(True)}), {"z": -X - X})
    assert [v.name for v in model.proto.graph.output] == ["y", "z"]


def test_sequences_are_lists_and_empty_optionals_are_none() -> None:
    runner = Runner.open(
        parsed("""g (float[2, 3] x, optional(float[1]) o) => (seq(float[2, 3]) s, optional(float[1]) p) {
            s = SequenceConstruct (x, x)
            p = Identity (o)
        }""")
    )
    for fed in ({"x": X, "o": None}, {"x": X}):
        found = runner.run(fed)
        same(found, {"s": [X, X], "p": None})
        assert isinstance(found["s"], list)


@pytest.mark.parametrize("between", ["n = Identity (m)", "n = Abs (m)"])
@pytest.mark.parametrize("optimized", [True, False])
def test_a_training_normalization_never_writes_into_its_inputs(between: str, optimized: bool) -> None:
    """onnxruntime updates them in place if they have no other readers."""
    model = parsed(f"""g (float[2, 3] x, float[3] s, float[3] m, float[3] v) => (float[2, 3] y, float[3] z) {{
        {between}
        y, m2, v2 = BatchNormalization <training_mode = 1> (x, s, s, n, v)
        z = Add (m2, v2)
    }}""")
    runner = Runner.open(model, SessionOptions(optimized=optimized))
    fed = {"x": X, "s": np.ones(3, np.float32), "m": np.zeros(3, np.float32), "v": np.ones(3, np.float32)}
    before = {name: value.copy() for name, value in fed.items()}
    first, second = runner.run(fed), runner.run(fed)
    same(fed, before)
    same(first, second)


# -- weights -------------------------------------------------------------------------------------------


def stubs(model: Model) -> list[str]:
    return [t.name for t in wire.tensors(model.proto) if tensors.is_stub(t)]


@pytest.mark.parametrize("external", [False, True])
def test_weights_stay_in_their_file(tmp_path: Path, external: bool) -> None:
    Model.load(heavy()).save(tmp_path / "m.onnx", external_data=external)
    model = Model.load(tmp_path / "m.onnx")
    before = model.proto.SerializeToString(deterministic=True)
    runner = Runner.open(model)
    assert stubs(model) == ["w"]
    assert model.proto.SerializeToString(deterministic=True) == before
    np.testing.assert_allclose(runner.run({"x": ROW})["y"], ROW @ WEIGHT, atol=CLOSE, rtol=0)


def test_a_pending_cast_is_applied(tmp_path: Path) -> None:
    """The rounded weight is used instead of the one in the file."""
    onnx.save(heavy(), tmp_path / "m.onnx")
    converted = amp_rewrite.convert(tmp_path / "m.onnx", to="float16").result
    assert stubs(converted)
    emulated = Runner.open(amp_rewrite.emulate(converted, io="float32", rounding=False))
    pending = Runner.open(converted)
    rounded = WEIGHT.astype(np.float16).astype(np.float32)
    y = emulated.run({"x": ROW})["y"]
    np.testing.assert_allclose(y, ROW @ rounded, atol=CLOSE, rtol=0)
    assert np.abs(y - ROW @ WEIGHT).max() > CLOSE
    z = pending.run({"x": ROW})["y"]
    np.testing.assert_allclose(z, y, atol=2.0**-10 * 60)


def test_large_weights_in_memory_are_passed_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.runtime.ports._MAX_MESSAGE_BYTES", 1 << 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    y = Runner.open(Model.load(heavy())).run({"x": ROW})["y"]
    np.testing.assert_allclose(y, ROW @ WEIGHT, atol=CLOSE, rtol=0)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.runtime.ports._MAX_MESSAGE_BYTES", 1 << 10)

    def full(*_: object, **__: object) -> None:
        raise ModelError("No space left on device")

    monkeypatch.setattr(Model, "save", full)
    with pytest.raises(ModelError, match=r"temporary folder .* failed: No space left on device; set TMPDIR"):
        Runner.open(Model.load(heavy()))


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(heavy(), path)
    model = Model.load(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelError, match=r"m\.onnx has changed since the model was loaded from it; load it again"):
        Runner.open(model)


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fed", "outputs", "message"),
    [
        ({}, None, "input 'x' is missing; pass an array for each of ['x']"),
        ({"X": X}, None, "the model has no input 'X'; did you mean 'x'?"),
        ({"x": X, "xx": X}, None, "the model has no input 'xx'; did you mean 'x'?"),
        ({"x": X}, ["yy"], "the model has no output 'yy'; did you mean 'y'?"),
        (
            {"x": X.astype(np.float64)},
            None,
            "onnxruntime cannot run the model: Unexpected input data type. Actual: (tensor(double)) , expected:"
            " (tensor(float)); check the data against the model's inputs",
        ),
    ],
)
def test_mismatched_inputs_are_one_line(fed: dict[str, object], outputs: list[str] | None, message: str) -> None:
    with pytest.raises(ModelError) as error:
        Runner.open(parsed(TWO)).run(fed, outputs)
    assert str(error.value) == message


# -- providers -----------------------------------------------------------------------------------------


@pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers() or cuda_works(),
    reason="for an onnxruntime with CUDA on a machine without",
)
def test_a_provider_that_does_not_open_is_not_reported(capfd: pytest.CaptureFixture[str]) -> None:
    runner = Runner.open(parsed(TWO), SessionOptions(providers=[CUDA, CPU]))
    assert runner.provider == CPU
    with pytest.raises(ModelError) as error:
        Runner.open(parsed(TWO), SessionOptions(providers=[CUDA]))
    assert str(error.value) == (
        "CUDAExecutionProvider cannot be loaded on this machine, but CPUExecutionProvider can; add"
        " CPUExecutionProvider to the providers, or install the missing libraries"
    )
    assert capfd.readouterr() == ("", "")


# -- traps of the runtime ------------------------------------------------------------------------------


Options = list[dict[str, object]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Collect the options of each opened session."""
    seen: Options = []

    class Spy(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, given: object, settings: onnxruntime.SessionOptions, *rest: object, **more: object) -> None:
            found = {"reuse": settings.enable_mem_reuse, "threads": settings.intra_op_num_threads}
            level = settings.graph_optimization_level.name
            seen.append({**found, "level": level, "disabled": more["disabled_optimizers"]})
            super().__init__(given, settings, *rest, **more)

    monkeypatch.setattr("onnxruntime.InferenceSession", Spy)
    return seen


USUAL = {"reuse": True, "threads": 0, "level": "ORT_ENABLE_ALL", "disabled": None}


def test_options_reach_the_runtime(opened: Options) -> None:
    Runner.open(parsed(TWO))
    Runner.open(parsed(TWO), SessionOptions(optimized=False, threads=1))
    Runner.open(parsed(TWO), SessionOptions(planned=False))
    assert opened == [USUAL, {**USUAL, "level": "ORT_DISABLE_ALL", "threads": 1}, {**USUAL, "reuse": False}]


def test_optimizers_that_may_crash_the_process_are_disabled_if_needed(
    opened: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runner.open(convert(TESTS / "models" / "lstm_ts13.onnx").result)  # with Transposes split by the conversion
    fault = next(fault for fault in FAULTS if "MatmulTransposeFusion" in fault.skip)
    monkeypatch.setattr("amp_rewrite.runtime.runner.faults_to_avoid", lambda *_: [fault])
    Runner.open(parsed(TWO))
    assert opened == [USUAL, {**USUAL, "disabled": ["MatmulTransposeFusion"]}]


# -- training normalizations ---------------------------------------------------------------------------


def test_inputs_updated_by_a_training_normalization_are_found_through_copies() -> None:
    graph = parsed(
        """g (float[1, 2] x, float[2] s, float[2] b, float[2] m, float[2] v) => (float[1, 2] y, float[2] k) {
            one = Identity (m)
            two = Identity (one)
            k = Identity (s)
            n = Neg (v)
            y, mean, var = BatchNormalization <training_mode = 1> (x, s, b, two, n)
        }"""
    ).proto.graph
    assert written_to(graph) >= {"m", "one", "two", "n"}
    assert not written_to(graph) & {"x", "s", "b", "v", "k", "y"}


# -- state on the device: one set of buffers is read while the other is written ------------------------

COUNTING = """<ir_version: 10, opset_import: ["": 20]>
net (float[N] x, float[2] s, float t) => (float[2] new_s, float[] new_t, float[] sum) {
  sum = ReduceSum <keepdims = 0> (x)
  new_s = Add (s, sum)
  new_t = Identity (t)
}"""


def buffered(text: str, **state: object) -> BufferedRunner:
    runner = Runner.open(Model.load(onnx.parser.parse_model(text)), SessionOptions(pooled=False))
    buffer = runner.double_buffer({name: np.array(value, np.float32) for name, value in state.items()})
    return runner.buffered(buffer, {name: f"new_{name}" for name in state}, ["sum"])


def test_a_run_alternates_between_two_sets_of_buffers() -> None:
    binding = buffered(COUNTING, s=[1, 2], t=5)
    seen = [float(binding.run(side, {"x": np.array([3, 4], np.float32)})["sum"]) for side in (0, 1, 0)]

    assert seen == [7, 7, 7]
    assert {n: a.tolist() for n, a in binding.buffer.arrays(0).items()} == {"s": [1 + 14, 2 + 14], "t": 5}
    assert {n: a.tolist() for n, a in binding.buffer.arrays(1).items()} == {"s": [1 + 21, 2 + 21], "t": 5}
    binding = buffered(COUNTING, s=[1, 2], t=5)
    places = [value.data_ptr() for side in binding.buffer.sides for value in side.values()]
    binding.run(0, {"x": np.ones(1, np.float32)})

    assert len(set(places)) == 4
    assert binding.buffer.arrays(0)["s"].tolist() == [1, 2]  # the side that was read is unchanged
    assert places == [value.data_ptr() for side in binding.buffer.sides for value in side.values()]


def test_inputs_may_change_size_and_their_arrays_may_be_reused() -> None:
    binding = buffered(COUNTING, s=[0, 0], t=0)
    x = np.ones(4, np.float32)
    seen = []
    for size in (4, 2, 0, 3):
        seen.append(float(binding.run(0, {"x": x[:size]})["sum"]))
        x *= 2

    assert seen == [4, 4, 0, 24]


def test_unknown_outputs_and_arrays_for_no_input_are_refused() -> None:
    runner = Runner.open(Model.load(onnx.parser.parse_model(COUNTING)))
    with pytest.raises(ModelError) as error:
        runner.buffered(runner.double_buffer({}), {}, ["loss"])
    assert str(error.value) == "the model has no output 'loss'; it has 'new_s', 'new_t', 'sum'"
    binding = buffered(COUNTING, s=[0, 0], t=0)
    with pytest.raises(ModelError) as error:
        binding.run(0, {"s": np.zeros(2, np.float32)})
    assert str(error.value) == "'s' is not an input; the inputs are x"


# -- tensors of other libraries as values of onnxruntime --


class Tensor:
    """A tensor of another library on a numbered GPU."""

    def __init__(self, device: str, at: int) -> None:
        self.place = device, at

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 0, self.place[1]


class Value:
    """A stub of OrtValue's location."""

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
def test_a_tensor_is_bound_in_place_or_copied(
    lies: tuple[str, int], wanted: tuple[str, int], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "copy_to", lambda value, *place: place)
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    found = buffers.value_on(Tensor(*lies), *wanted)
    assert isinstance(found, Value) if same else found == wanted


class Elsewhere:
    """A value in a device's memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def device_name(self) -> str:
        return "cuda"

    def element_type(self) -> int:
        return int(self.value.element_type())


def test_types_that_numpy_lacks_are_copied_only_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(6, dtype=DType.BFLOAT16.numpy).reshape(2, 3)
    places: list[str] = []

    def copied(value: Any, device: str, index: int = 0) -> Any:
        places.append(f"{device}:{index}")
        return getattr(value, "value", value)

    monkeypatch.setattr(buffers, "copy_to", copied)
    here = from_array(array)
    assert to_array(here).tolist() == array.tolist() and places == []
    from_array(array, "cuda", 1)
    assert to_array(Elsewhere(here)).tolist() == array.tolist()
    assert places == ["cuda:1", "cpu:0"]
