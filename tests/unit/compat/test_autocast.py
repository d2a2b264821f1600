"""`python -m amp_rewrite.compat.autocast`: the command line of ModelOpt AutoCast."""

import argparse
from pathlib import Path

import numpy as np
import onnx
import pytest

from amp_rewrite.compat.autocast import main, parser, translated
from unit.compat.test_float16 import FULL, HALF, io_types, model, weight_types

# The options that `python -m modelopt.onnx.autocast --help` of nvidia-modelopt 0.47.0 prints.
OPTIONS_0_47 = (
    "--help -h --onnx_path --output_path --low_precision_type -t --calibration_data -d --nodes_to_exclude -ne "
    "--op_types_to_exclude -ope --nodes_to_include -ni --op_types_to_include -opi --data_max --init_max "
    "--init_conversion_max_bytes --max_depth_of_reduction --keep_io_types --log_level --providers --trt_plugins "
    "--trt_plugins_precision --opset --use_standalone_type_inference"
)
BF16 = onnx.TensorProto.BFLOAT16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def run(source: Path, *words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--onnx_path", str(source), *words])
    assert (left.value.code or 0) == code


def test_options_are_those_of_the_other_command_line_and_so_is_the_name_of_the_result(source: Path) -> None:
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


def test_data_with_their_largest_value_become_ranges_with_a_headroom(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", x=np.full((1, 64), 1000, np.float32))
    data = ("--calibration_data", str(tmp_path / "data.npz"))
    run(source, *data, "--data_max", "60000")
    assert "beyond 65504" not in capfd.readouterr().out
    run(source, *data, "--data_max", "100")
    assert "with headroom 655.04, beyond 65504" in capfd.readouterr().out


def test_options_without_effect_are_told_and_unknown_ones_refused(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(source, "--providers", "cpu", "--init_max", "100", "--data_max", "9", "--trt_plugins", "x.so")
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert [line.split()[1] for line in told] == ["--data_max", "--init_max", "--trt_plugins"]
    run(source, "--keep_io", code=2)
    assert "unrecognized arguments: --keep_io" in capfd.readouterr().err
    run(source.with_name("absent.onnx"), code=2)
    assert "absent.onnx" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
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
def test_options_of_the_other_converter_become_words_of_ours(given: str, words: str) -> None:
    parsed = parser().parse_args(["--onnx_path", "m.onnx", *given.split()])
    ours = words.replace("COMMON", "--fuse basic --overwrite").split()
    assert translated(parsed) == ["convert", *ours, "--", "m.onnx"]
