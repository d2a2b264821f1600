"""Replacements for two other converters and for the command line of ModelOpt AutoCast."""

import argparse
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_rewrite.compat import (
    DEFAULT_OP_BLOCK_LIST,
    auto_convert_mixed_precision,
    auto_convert_mixed_precision_model_path,
    convert_float_to_float16,
    convert_float_to_float16_model_path,
)
from amp_rewrite.compat.autocast import main, parser, translated

# Read with inspect.signature: the parameters in order, each with its default.
COMMON_1_16 = {  # onnxconverter-common 1.16.0
    convert_float_to_float16: (
        "model, min_positive_val=1e-07, max_finite_val=10000.0, keep_io_types=False, disable_shape_infer=False,"
        " op_block_list=None, node_block_list=None, check_fp16_ready=True"
    ),
    convert_float_to_float16_model_path: (
        "model_path, min_positive_val=1e-07, max_finite_val=10000.0, keep_io_types=False"
    ),
    auto_convert_mixed_precision: "model, feed_dict, validate_fn=None, rtol=None, atol=None, keep_io_types=False",
    auto_convert_mixed_precision_model_path: (
        "source_model_path, input_feed, target_model_path, provider, location=None, customized_validate_func=None,"
        " rtol=None, atol=None, keep_io_types=True, verbose=False"
    ),
}
RUNTIME_1_32 = {  # onnxruntime.transformers.float16 of onnxruntime 1.32.0
    convert_float_to_float16: (
        "model, min_positive_val=5.96e-08, max_finite_val=65504.0, keep_io_types=False, disable_shape_infer=False,"
        " op_block_list=None, node_block_list=None, force_fp16_initializers=False, force_fp16_inputs=None,"
        " use_bfloat16_as_blocked_nodes_dtype=False"
    )
}
OURS_FOR = {"min_positive_val", "max_finite_val", "check_fp16_ready"}
"""Parameters with the default None here, so that only explicit values warn."""


def model(**named: str) -> onnx.ModelProto:
    """x -> MatMul `first` -> Softmax `soft` -> MatMul `second` -> y; `named` renames nodes."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(64, 64)).astype(np.float32), name) for name in ("a", "b")]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], named.get("first", "first")),
        helper.make_node("Softmax", ["h"], ["s"], "soft"),
        helper.make_node("MatMul", ["s", "b"], ["y"], "second"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def io_types(proto: onnx.ModelProto) -> list[int]:
    return [value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)]


def weight_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the type of each MatMul's matrix."""
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    return {node.name: types[node.input[1]] for node in proto.graph.node if node.op_type == "MatMul"}


HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.mark.parametrize("peer", [COMMON_1_16, RUNTIME_1_32])
def test_every_argument_of_the_other_converter_keeps_its_position(peer: dict) -> None:
    for function, parameters in peer.items():
        theirs = dict(word.partition("=")[::2] for word in parameters.split(", "))
        ours = inspect.signature(function).parameters
        assert theirs.keys() <= ours.keys()
        in_place = [name for name, p in ours.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(theirs)[: len(in_place)] == in_place
        for name in theirs.keys() - OURS_FOR:
            default = ours[name].default
            assert theirs[name] == ("" if default is inspect.Parameter.empty else str(default)), name


def test_products_are_lowered_the_source_stays_and_op_types_may_be_blocked() -> None:
    source = model()
    before = source.SerializeToString()
    assert weight_types(convert_float_to_float16(source)) == {"first": HALF, "second": HALF}
    assert source.SerializeToString() == before
    half = convert_float_to_float16(model(), op_block_list=[*DEFAULT_OP_BLOCK_LIST, "MatMul", "RoiAlign"])
    assert weight_types(half) == {"first": FULL, "second": FULL}


@pytest.mark.parametrize("name", ["first", "layer[0], MatMul=1*", "re:x"])
def test_a_blocked_node_with_any_characters_in_its_name_stays_float32(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = convert_float_to_float16(model(first=name), node_block_list=[name])
    assert weight_types(half) == {name: FULL, "second": HALF}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"node_block_list": ["frist"]}, "node 'frist' of node_block_list is not in the model"),
        ({"keep_io_types": ["z"]}, "'z' of keep_io_types is not in the model"),
        ({"max_finite_val": 1e4}, "max_finite_val=10000.0 has no effect; docs/how-to/migrating.md"),
        ({"min_positive_val": 1e-7}, "min_positive_val=1e-07 has no effect"),
        ({"force_fp16_initializers": True}, "force_fp16_initializers=True has no effect"),
        ({"force_fp16_inputs": {"Resize": [1]}}, "force_fp16_inputs=.* has no effect"),
        ({"use_bfloat16_as_blocked_nodes_dtype": True}, "use_bfloat16_as_blocked_nodes_dtype=True has no effect"),
    ],
)
def test_options_without_effect_warn_at_the_callers_line(arguments: dict, words: str) -> None:
    with pytest.warns(UserWarning, match=words) as warned:
        convert_float_to_float16(model(), **arguments)
    assert [warning.filename for warning in warned] == [__file__]


def test_a_half_model_is_refused_on_request_and_otherwise_completed() -> None:
    partly = convert_float_to_float16(model(), node_block_list=["first"])
    with pytest.raises(ValueError, match="already contains float16"):
        convert_float_to_float16(partly, check_fp16_ready=True)
    assert weight_types(convert_float_to_float16(partly, check_fp16_ready=False)) == {"first": HALF, "second": HALF}
    assert weight_types(convert_float_to_float16(model(), check_fp16_ready=True))["first"] == HALF


def test_a_file_is_converted_from_its_path(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    half = convert_float_to_float16_model_path(str(tmp_path / "m.onnx"), keep_io_types=True)
    assert io_types(half) == [FULL, FULL]
    assert weight_types(half)["second"] == HALF
    for name, value in (("max_finite_val", 1e4), ("min_positive_val", 1e-6)):
        with pytest.warns(UserWarning, match=f"{name}={value} has no effect"):
            convert_float_to_float16_model_path(tmp_path / "m.onnx", **{name: value})


# -- the search for the fewest ops in float32 -----------------------------------------------------------------

BATCH = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}


def always(expected: Sequence, tried: Sequence) -> bool:
    return True


def near(expected: Sequence, tried: Sequence) -> bool:
    return all(np.allclose(b, a, 0, 1e-6) for a, b in zip(expected, tried, strict=True))


@pytest.mark.parametrize(
    "bounds", [{"rtol": 0, "atol": 1e-6}, {"validate_fn": near}, {"validate_fn": always, "atol": 1e-6}]
)
def test_products_stay_float32_if_the_bound_requires_it(bounds: dict) -> None:
    half = auto_convert_mixed_precision(model(), BATCH, keep_io_types=True, **bounds)
    assert io_types(half) == [FULL, FULL]
    assert weight_types(half)["second"] == FULL


def test_validate_fn_gets_both_models_outputs_and_the_tolerance_also_applies() -> None:
    seen: list[tuple] = []

    def validate(expected: Sequence, tried: Sequence) -> bool:
        seen.append((expected, tried))
        return True

    half = auto_convert_mixed_precision(model(), BATCH, validate, rtol=0, atol=1e-6, keep_io_types=True)
    assert weight_types(half)["second"] == FULL
    assert all(len(expected) == len(tried) == 1 for expected, tried in seen)
    np.testing.assert_array_equal(seen[0][0][0], seen[0][1][0])  # the float32 model is compared first
    assert any(np.any(expected[0] != tried[0]) for expected, tried in seen)


def test_outputs_that_no_choice_brings_within_bounds_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"validation failed: .*keep_io_types=True"):
        auto_convert_mixed_precision(model(), BATCH, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"validation failed: .*keep_io_types=True"):
        auto_convert_mixed_precision(model(), BATCH, lambda a, b: a[0] is b[0] or np.array_equal(a[0], b[0]))
    with pytest.raises(ValueError, match=r"float32 model itself; fix validate_fn"):
        auto_convert_mixed_precision(model(), BATCH, lambda a, b: False)


CPU = ["CPUExecutionProvider"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("location", [None, "weights.bin"])
def test_a_file_is_converted_with_its_weights_beside_it(source: Path, tmp_path: Path, location: str | None) -> None:
    target = tmp_path / "made" / "half.onnx"
    for _ in range(2):  # the second replaces the first
        auto_convert_mixed_precision_model_path(str(source), BATCH, str(target), CPU, location, rtol=0.05, atol=0.05)
    half = onnx.load(target)
    assert weight_types(half) == {"first": HALF, "second": HALF}
    assert io_types(half) == [FULL, FULL]
    assert {path.name for path in target.parent.iterdir()} == {"half.onnx", location or "fp16_tensor.data"}


def test_another_provider_and_verbose_warn_at_the_callers_line(source: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as caught:
        auto_convert_mixed_precision_model_path(
            str(source), BATCH, tmp_path / "half.onnx", ["CUDAExecutionProvider"], None, always, verbose=True
        )
    assert [str(w.message).partition("=")[0] for w in caught] == ["provider", "verbose"]
    assert {w.filename for w in caught} == {__file__}


def test_the_default_bound_is_that_of_the_other_converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bounds: list[tuple[float, float]] = []
    result = SimpleNamespace(model="the model", save=lambda *_, **named: None)

    def repair(*_: object, **named: float) -> SimpleNamespace:
        bounds.append((named["rtol"], named["atol"]))
        return SimpleNamespace(solved=True, converted=result)

    monkeypatch.setattr("amp_rewrite.compat.mixed_precision.repair", repair)
    for tolerance in ({"rtol": 1e-2}, {"atol": 0.0}):
        assert auto_convert_mixed_precision(model(), BATCH, **tolerance) == "the model"
        auto_convert_mixed_precision_model_path("m.onnx", BATCH, tmp_path / "a" / "half.onnx", CPU, **tolerance)
    assert bounds == [(1e-2, 1e-8), (1e-2, 1e-5), (1e-5, 0.0), (1e-3, 0.0)] and (tmp_path / "a").is_dir()


# -- `python -m amp_rewrite.compat.autocast` --------------------------------------------------------------

# The options in `python -m modelopt.onnx.autocast --help` of nvidia-modelopt 0.47.0.
OPTIONS_0_47 = (
    "--help -h --onnx_path --output_path --low_precision_type -t --calibration_data -d --nodes_to_exclude -ne "
    "--op_types_to_exclude -ope --nodes_to_include -ni --op_types_to_include -opi --data_max --init_max "
    "--init_conversion_max_bytes --max_depth_of_reduction --keep_io_types --log_level --providers --trt_plugins "
    "--trt_plugins_precision --opset --use_standalone_type_inference"
)
BF16 = onnx.TensorProto.BFLOAT16


def run(source: Path, *words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--onnx_path", str(source), *words])
    assert (ended.value.code or 0) == code


def test_options_and_output_name_match_the_other_command_line(source: Path) -> None:
    actions: list[argparse.Action] = parser()._actions
    assert {word for action in actions for word in action.option_strings} == {*OPTIONS_0_47.split()}
    for _ in range(2):  # an existing result is replaced
        run(source)
    half = onnx.load(source.with_name("m.fp16.onnx"))
    assert io_types(half) == [HALF, HALF]
    assert weight_types(half) == {"first": HALF, "second": HALF}


def test_type_exclusions_and_inputs_are_honoured(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = source.with_name("out.onnx")
    run(
        source, "-t", "bf16", "--keep_io_types", "-ne", "fir", "absent.*", "-ope", "RoiAlign", "--output_path", str(out)
    )
    half = onnx.load(out)
    assert io_types(half) == [FULL, FULL]
    assert weight_types(half) == {"first": FULL, "second": BF16}
    assert "warning: no node matches 'absent.*', so it has no effect" in capfd.readouterr().err


def test_data_and_a_largest_value_become_ranges_with_a_headroom(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", x=np.full((1, 64), 1000, np.float32))
    data = ("--calibration_data", str(tmp_path / "data.npz"))
    run(source, *data, "--data_max", "60000")
    assert "beyond 65504" not in capfd.readouterr().out
    run(source, *data, "--data_max", "100")
    assert "with headroom 655.04, beyond 65504" in capfd.readouterr().out


def test_options_without_effect_are_reported_and_unknown_ones_refused(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(source, "--providers", "cpu", "--init_max", "100", "--data_max", "9", "--trt_plugins", "x.so")
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert [line.split()[1] for line in warnings] == ["--data_max", "--init_max", "--trt_plugins"]
    run(source, "--keep_io", code=2)
    assert "unrecognized arguments: --keep_io" in capfd.readouterr().err
    run(source.with_name("absent.onnx"), code=2)
    assert "absent.onnx" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--to float16 --io low COMMON -o m.fp16.onnx"),
        ("-t bf16 --keep_io_types", "--to bfloat16 --io keep COMMON -o m.bf16.onnx"),
        ("-ne a b", r"--to float16 --io low COMMON --keep re:\A(?:a) --keep re:\A(?:b) -o m.fp16.onnx"),
        ("-ni a", r"--to float16 --io low COMMON --lower re:\A(?:a) -o m.fp16.onnx"),
        ("-d d.npz", "--to float16 --io low COMMON --data d.npz -o m.fp16.onnx"),
        ("-d d.npz --data_max 0.5", "--to float16 --io low COMMON --data d.npz --set headroom=131008.0 -o m.fp16.onnx"),
        ("--opset 19", "--to float16 --io low COMMON --opset 19 -o m.fp16.onnx"),
        ("--log_level ERROR", "--to float16 --io low COMMON --quiet -o m.fp16.onnx"),
    ],
)
def test_options_of_the_other_converter_are_translated(arguments: str, words: str) -> None:
    parsed = parser().parse_args(["--onnx_path", "m.onnx", *arguments.split()])
    ours = words.replace("COMMON", "--fuse basic --overwrite").split()
    assert translated(parsed) == ["convert", *ours, "--", "m.onnx"]
