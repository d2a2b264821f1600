"""Sessions: conversions, fallbacks and their notes, caching and binding."""

import warnings
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import ModelError, PatternError, PolicyError, Session, Target
from amp_rewrite.deploy import session as home
from amp_rewrite.deploy.session import IGNORE_PERFORMANCE, chosen_cache
from amp_rewrite.errors import ConversionError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import CPU, CUDA, TENSORRT, Runner, SessionOptions, cuda_works
from amp_rewrite.train import policy as policies
from support import stub
from support.paths import ROOT

CNN = ROOT / "examples" / "models" / "digits_cnn.onnx"
IMAGES = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
MLP = """<ir_version: 10, opset_import: ["": 20]> mlp (float[2, 8] x) => (float[2, 2] y)
    <float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> { m = MatMul (x, w)  y = Relu (m) }"""
NO_GPU = Hardware(unavailable_reason="no NVIDIA driver is installed here: libcuda.so.1 cannot be loaded")
T4 = Hardware((Gpu("Tesla T4", (7, 5)),), (13, 0))
CLOSED = (
    "CUDAExecutionProvider does not load: libcublas.so.13 cannot be loaded; `amp-rewrite doctor` shows what is missing"
)
ANYWAY = "; to convert it anyway, pass ignore_performance=True"
NO_GPU_2 = "there is no GPU 2; the last GPU of this machine is number 0"

pytestmark = pytest.mark.skipif(cuda_works(), reason="for a machine on which everything runs on the CPU")


def mlp() -> onnx.ModelProto:
    return onnx.parser.parse_model(MLP)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A fresh process on a machine without a GPU, with a temporary cache."""
    monkeypatch.setattr(policies, "state", policies.ProcessSettings())
    monkeypatch.setattr(home, "hardware", lambda: NO_GPU)
    monkeypatch.setattr(home, "chosen_cache", _not_the_users_own(tmp_path / "cache"))
    monkeypatch.delenv(IGNORE_PERFORMANCE, raising=False)
    yield monkeypatch


def _not_the_users_own(folder: Path) -> Any:
    chosen = home.chosen_cache
    return lambda cache: chosen(folder if cache is True else cache)


def quietly(*arguments: Any, **options: Any) -> Session:
    """Open a session, with its warnings in its notes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        session = Session(*arguments, **options)
    assert [str(warning.message) for warning in warned] == list(session.notes)
    assert {warning.filename for warning in warned} <= {__file__}
    return session


# -- conversion ----------------------------------------------------------------------------------------


def test_a_model_runs_unchanged_without_a_policy_and_converted_with_one() -> None:
    session = quietly(mlp())
    assert (session.notes, session.converted, session.report) == ((), False, None)
    assert session.get_providers() == [CPU]
    np.testing.assert_array_equal(session.run({"x": np.eye(2, 8, dtype=np.float32)})["y"], [[1, 2], [3, 4]])
    session = quietly(CNN, policy="mixed_float16", ignore_performance=True)
    assert (session.notes, session.converted) == ((), True)
    converted = amp_rewrite.convert(CNN)
    assert session.report == converted.report
    expected = Runner.open(converted.result).run({"image": IMAGES})
    np.testing.assert_array_equal(session.run({"image": IMAGES})["probability"], expected["probability"])


@pytest.mark.parametrize(
    ("found", "options", "why"),
    [
        (NO_GPU, {}, f"{NO_GPU.unavailable_reason}; on a CPU, float16 is slower, not faster{ANYWAY}"),
        (NO_GPU, {"providers": [CPU]}, f"on a CPU, float16 is slower, not faster{ANYWAY}"),
        (
            T4,
            {"policy": "mixed_bfloat16"},
            "bfloat16 is only fast on GPUs with compute capability 8.0 or higher; this one is Tesla T4, compute"
            f" capability 7.5{ANYWAY}",
        ),
        (T4, {"providers": [(CUDA, {"device_id": 2}), CPU]}, f"{NO_GPU_2}{ANYWAY}"),
        (T4, {}, f"{CLOSED}{ANYWAY}"),
    ],
)
def test_a_model_stays_unchanged_if_a_low_type_is_not_faster(
    machine: pytest.MonkeyPatch, found: Hardware, options: dict[str, Any], why: str
) -> None:
    machine.setattr(home, "hardware", lambda: found)
    machine.setattr(home, "library_load_error", lambda: "libcublas.so.13 cannot be loaded")
    session = quietly(mlp(), **{"policy": "mixed_float16", **options})
    assert session.notes[0] == f"the model was not converted and runs unchanged on {CPU}: {why}"
    assert not session.converted
    closed = [f"the model runs on {CPU}: {CLOSED}"] if found.gpus and CLOSED not in why else []
    assert list(session.notes[1:]) == closed


@pytest.mark.parametrize(
    ("word", "argument", "converted"),
    [("1", None, True), ("0", None, False), ("OFF", None, False), ("1", False, False)],
)
def test_an_argument_overrides_the_environment_that_ignores_performance(
    machine: pytest.MonkeyPatch, word: str, argument: bool | None, converted: bool
) -> None:
    machine.setenv("AMP_REWRITE_IGNORE_PERFORMANCE", word)
    assert quietly(mlp(), policy="mixed_float16", ignore_performance=argument).converted is converted


def test_an_unusable_cuda_graph_or_provider_is_reported() -> None:
    for options in ({"cuda_graph": True}, {"providers": [(CUDA, {"enable_cuda_graph": 1}), CPU]}):
        notes = quietly(mlp(), **options).notes
        assert notes[-1] == f"the model runs without a CUDA graph: it runs on {CPU}"
    session = quietly(mlp(), providers=[CUDA, CPU])
    assert session.notes == (f"the model runs on {CPU}: {NO_GPU.unavailable_reason}",)
    assert (session.provider, session.get_providers()) == (CPU, [CPU])
    session = quietly(mlp(), policy="mixed_float16", ignore_performance=True, keep="op=MatMul")
    assert session.notes == (f"the model was not converted and runs unchanged on {CPU}: nothing in it can be lowered",)


def test_a_conversion_that_fails_its_check_leaves_the_model_unchanged(machine: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ConversionError("the converted model is wrong; please report it")

    machine.setattr(home, "convert", broken)
    session = quietly(mlp(), policy="mixed_float16", ignore_performance=True)
    assert session.notes == (
        f"the model was not converted and runs unchanged on {CPU}: the converted model is wrong; please report it",
    )
    session.run({"x": np.eye(2, 8, dtype=np.float32)})


def test_a_converted_model_that_does_not_open_is_replaced_by_its_source() -> None:
    session = quietly(mlp(), policy="mixed_bfloat16", ignore_performance=True)
    assert len(session.notes) == 1
    assert session.notes[0].startswith(
        f"the model was not converted and runs unchanged on {CPU}: the converted model does not load (onnxruntime"
        " cannot open the model: Could not find an implementation for MatMul"
    )
    assert (session.converted, session.report) == (False, None)


def test_a_callers_mistake_is_an_error_and_not_a_fallback() -> None:
    with pytest.raises(PatternError):
        Session(mlp(), policy="mixed_float16", ignore_performance=True, keep="op=Softmax")
    with pytest.raises(
        TypeError, match=r"^Session\(\) got an unexpected keyword argument 'kep'; did you mean 'keep'\?"
    ):
        Session(mlp(), kep="op=MatMul")
    with pytest.raises(PolicyError) as error:
        Session(mlp(), policy="float16")
    assert str(error.value) == (
        "policy 'float16' does not keep results in float32; use mixed_float16, and io='low' for low inputs and outputs"
    )
    with pytest.raises(PolicyError, match=r"^device_id '-1' is not the number of a GPU; GPUs are numbered from 0$"):
        Session(mlp(), providers=[(CUDA, {"device_id": -1}), CPU])


# -- the switch ----------------------------------------------------------------------------------------


def test_one_line_makes_all_later_sessions_convert(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(IGNORE_PERFORMANCE, "1")
    assert amp_rewrite.enable_mixed_precision_graph_rewrite() is None
    assert Session(mlp()).converted
    assert not Session(mlp(), policy="float32").converted
    amp_rewrite.disable_mixed_precision_graph_rewrite()
    assert not Session(mlp()).converted


def test_the_policy_of_the_process_applies_to_its_sessions(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(IGNORE_PERFORMANCE, "1")
    machine.setattr(policies, "query_hardware", lambda: Hardware((Gpu("H200", (9, 0)),)))
    with amp_rewrite.policy_scope("mixed_float16"):
        assert Session(mlp()).converted
        with pytest.raises(
            PolicyError, match="the policy is set to 'mixed_float16', and only one of the two can be active"
        ):
            amp_rewrite.enable_mixed_precision_graph_rewrite()
    assert not Session(mlp()).converted


# -- the cache -----------------------------------------------------------------------------------------


def count(machine: pytest.MonkeyPatch) -> list[str]:
    """Count conversions from now on."""
    conversions: list[str] = []
    convert = amp_rewrite.convert

    @wraps(convert)
    def counted(model: Any, **options: Any) -> Any:
        conversions.append(options["to"].spelling)
        return convert(model, **options)

    machine.setattr(home, "convert", counted)
    return conversions


def test_a_model_is_converted_once(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conversions = count(machine)
    options = {"policy": "mixed_float16", "ignore_performance": True, "cache": tmp_path / "own"}
    first, second = quietly(CNN, **options), quietly(CNN.read_bytes(), **options)
    assert len(conversions) == 1
    assert (second.converted, second.notes) == (True, ())
    assert (first.report, second.report) == (first.report,) * 2
    np.testing.assert_array_equal(*(s.run({"image": IMAGES})["probability"] for s in (first, second)))


def test_a_change_of_any_input_converts_again(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    conversions = count(machine)
    (tmp_path / "l.yaml").write_text("deny: [{op: Relu, because: a}]")
    base = {"policy": "mixed_float16", "ignore_performance": True}
    differing: list[dict[str, Any]] = [
        {},
        {"keep": "op=Relu"},
        {"keep": ["op=Relu"], "io": "low"},
        {"safety": "none"},
        {"lists": tmp_path / "l.yaml"},
        {"level": "tensor-cores-only"},
        {"target": "onnx"},
        {"target": Target.TENSORRT},
        {"lists": {"base": "empty", "allow": ["MatMul"]}},
        {"lists": {"base": "empty", "allow": ["MatMul"]}, "policy": "mixed_bfloat16"},
        *({"ranges": amp_rewrite.calibrate(mlp(), {"x": np.full((2, 8), top, np.float32)})} for top in (1, 2)),
    ]
    for options in differing:
        quietly(mlp(), **{**base, **options})
    (tmp_path / "l.yaml").write_text("deny: [{op: Relu, because: a}, {op: Tanh, because: b}]")
    quietly(mlp(), **base, lists=tmp_path / "l.yaml")
    assert len(conversions) == len(differing) + 1


def test_a_conversion_does_without_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session = quietly(mlp(), policy="mixed_float16", ignore_performance=True, cache=tmp_path / "file")
    assert session.converted
    place = f"{tmp_path}/file/v1: Not a directory; name a writable folder"
    assert session.notes == (f"the model will be converted again each time: {place}",)


def test_a_user_without_a_home_has_no_cache(machine: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    machine.setattr(Path, "home", homeless)
    machine.delenv("XDG_CACHE_HOME", raising=False)
    machine.setattr(home, "chosen_cache", chosen_cache)
    session = quietly(mlp(), policy="mixed_float16", ignore_performance=True)
    assert (session.converted, session.notes) == (True, ())


WRONG: list[Any] = [[], [None], [(CPU, {}, 1)], [(CPU, None)]]
NAMES = f"as in [{CPU!r}], or names with options, as in [({CPU!r}, {{}})]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": -1}, "threads is -1; use 1 to 1024 threads per op, or 0 for one per core"),
        ({"threads": 1025}, "threads is 1025; use 1 to 1024 threads per op, or 0 for one per core"),
        ({"threads": "all"}, "threads='all' must be a whole number, not str"),
        ({"ignore_performance": "no"}, "ignore_performance='no' must be True, False or None, not str"),
        ({"cuda_graph": 2}, "cuda_graph=2 must be True or False, not int"),
        ({"providers": CPU}, f"providers={CPU!r} must be a list or None, not str"),
        *(({"providers": wrong}, f"providers={wrong!r} must list names, {NAMES}") for wrong in WRONG),
        ({"cache": 3}, "cache=3 must be a Cache, a string, a path, True, False or None, not int"),
    ],
)
def test_a_senseless_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as error:
        Session(mlp(), **options)
    assert str(error.value) == message


# -- running -------------------------------------------------------------------------------------------


def test_rebound_values_keep_their_shape_and_a_session_runs_like_onnxruntimes() -> None:
    session = Session(mlp())
    x = np.eye(2, 8, dtype=np.float32)
    (listed,) = session.run(None, {"x": x})
    (named,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(listed, session.run({"x": x})["y"])
    np.testing.assert_array_equal(named, listed)
    assert [(port.name, port.type, port.shape) for port in session.get_inputs()] == [("x", "tensor(float)", [2, 8])]
    assert [port.name for port in session.get_outputs()] == ["y"]
    np.testing.assert_array_equal(session.inner.run(None, {"x": x})[0], listed)
    binding = Session(mlp()).bind({"x": np.eye(2, 8, dtype=np.float32)})
    with pytest.raises(ModelError) as error:
        binding.feed({"x": np.eye(3, dtype=np.float32)})
    assert str(error.value) == "input 'x' is bound as float32[2, 8], not float32[3, 3]; to change it, bind again"
    with pytest.raises(ModelError, match=r"^input 'z' is not bound; the bound inputs are 'x'$"):
        binding.feed({"z": np.eye(2, 8, dtype=np.float32)})


LOW = """<ir_version: 10, opset_import: ["": 20]> g (bfloat16[2] b, float16[2] h) => (bfloat16[2] c, float16[2] i)
    { c = Identity (b)  i = Identity (h) }"""


@pytest.mark.parametrize(
    ("feeds", "outputs", "message"),
    [
        ({"q": IMAGES}, None, "the model has no input 'q'; it has 'x'"),
        ({"x": IMAGES}, ["q"], "the model has no output 'q'; it has 'y'"),
        ([IMAGES], None, "inputs must be a mapping, not list; pass {name: array}"),
        ({"x": np.zeros((2, 8), np.float16)}, None, "input 'x' must be float32, not float16[2, 8]; cast the tensor"),
    ],
)
def test_values_that_cannot_be_bound_are_named(feeds: Any, outputs: list[str] | None, message: str) -> None:
    with pytest.raises(ModelError) as error:
        Session(mlp()).bind(feeds, outputs)
    assert str(error.value) == message


# -- on the CUDA stub ----------------------------------------------------------------------------------

ON_CUDA = """
import ml_dtypes, numpy as np, onnx.parser, sys
from amp_rewrite import Session
low, mlp = (onnx.parser.parse_model(text) for text in sys.argv[1:3])
b, h = np.array([1, 2.5], ml_dtypes.bfloat16), np.float16([3, 4])
binding = Session(low).bind({"b": b, "h": h})
found = binding.arrays()
print(binding.inputs["b"].device_name(), found["c"].tolist(), found["c"].dtype, found["i"].tolist())
binding.feed({"b": b + b})
print(binding.arrays()["c"].tolist(), b.tolist())
session = Session(mlp, policy="mixed_float16", ignore_performance=True, cache=None, cuda_graph=True)
print(session.notes, session.converted, session.get_providers())
print(list(session.bind({"x": np.eye(2, 8, dtype=np.float32)}).given_outputs))
"""


@pytest.mark.stub
def test_on_cuda_values_are_bound_on_the_device_at_fixed_addresses_for_graphs(cuda_stub: Path) -> None:
    done = stub.on_cuda(cuda_stub, ON_CUDA, LOW, MLP)
    assert done.stdout.splitlines() == [
        "cuda [1.0, 2.5] bfloat16 [3.0, 4.0]",
        "[2.0, 5.0] [1.0, 2.5]",
        "() True ['CUDAExecutionProvider', 'CPUExecutionProvider']",
        "['y']",
    ], done.stderr


class Foreign:
    """A tensor of another library with only DLPack; with a `fault` it cannot be exported."""

    def __init__(self, array: np.ndarray, fault: str = "") -> None:
        self.array, self.fault = array, fault

    def __dlpack__(self, **words: Any) -> Any:
        if self.fault:
            raise BufferError(self.fault)
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_tensors_of_other_libraries_are_bound_without_a_copy() -> None:
    x, y = np.eye(2, 8, dtype=np.float32), np.zeros((2, 2), np.float32)
    binding = Session(mlp()).bind({"x": Foreign(x)}, {"y": Foreign(y)})
    x *= 2
    binding.run()
    np.testing.assert_array_equal(y, [[2, 4], [6, 8]])
    binding.feed({"x": Foreign(np.eye(2, 8, dtype=np.float32))})
    binding.run()
    np.testing.assert_array_equal(y, [[1, 2], [3, 4]])
    with pytest.raises(ModelError) as error:
        Session(mlp()).bind({"x": Foreign(x, "it  needs\ngradients")})
    assert str(error.value) == "a tensor cannot be bound: it needs gradients; pass tensor.detach().contiguous()"


def test_outputs_of_known_shape_keep_their_address_for_a_graph() -> None:
    runner = Runner.open(Model(mlp()))
    binding = runner.bind({"x": np.eye(2, 8, dtype=np.float32)}, fixed=True)
    first = binding.run()["y"]
    binding.feed({"x": 2 * np.eye(2, 8, dtype=np.float32)})
    again = binding.run()["y"]
    assert first.data_ptr() == again.data_ptr()
    np.testing.assert_array_equal(again.numpy(), [[2, 4], [6, 8]])
    free = mlp()
    free.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(ModelError) as error:
        Runner.open(Model(free)).bind({"x": np.eye(2, 8, dtype=np.float32)}, fixed=True)
    assert str(error.value) == (
        "the shape of output 'y' is unknown before the run, but a CUDA graph writes to fixed addresses;"
        " pass outputs={'y': tensor}"
    )


@pytest.mark.parametrize(
    ("providers", "failing", "opened"),
    [
        ([TENSORRT, CUDA, CPU], "", (TENSORRT, "")),
        ([TENSORRT, CUDA, CPU], TENSORRT, (CUDA, f"no {TENSORRT}")),
        ([TENSORRT], TENSORRT, None),
        ([CUDA, CPU], CUDA, None),
        ([CUDA, TENSORRT], CUDA, None),
    ],
)
def test_other_providers_open_a_model_that_tensorrt_cannot(
    providers: list[str], failing: str, opened: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(_model: Model, opening: SessionOptions) -> str:
        if opening.providers[0] == failing:
            raise ModelError(f"no {failing}")
        return str(opening.providers[0])

    monkeypatch.setattr(Runner, "open", first)
    arguments = Model.load(mlp()), SessionOptions(providers=tuple(providers))
    if opened is None:
        with pytest.raises(ModelError, match=f"no {failing}"):
            home._open(*arguments)
    else:
        assert home._open(*arguments) == opened
