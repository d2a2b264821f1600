"""Keywords of public functions: the forms of a low type, None, values of a wrong type, and how errors spell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from amp_rewrite import DType, Policy, PolicyError, calibrate, convert, repair, verify
from amp_rewrite.errors import options_spelled, spelled
from amp_rewrite.settings import request
from amp_rewrite.settings.policy import low_type

NET = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] y)'
    " <float[8, 8] w = {" + ", ".join(["0.5"] * 64) + "}> { y = MatMul (x, w) }"
)
DATA = {"x": np.ones((2, 8), np.float32)}


@pytest.mark.parametrize(
    "to",
    [
        *("float16", "fp16", "half", " F16 ", "mixed_float16", Policy("mixed_float16"), DType.FLOAT16),
        *(np.float16, np.dtype("float16"), onnx.TensorProto.FLOAT16, np.int64(10)),
    ],
    ids=repr,
)
def test_float16_has_many_forms(to: Any) -> None:
    assert low_type(to) is DType.FLOAT16


@pytest.mark.torch
def test_a_torch_type_is_a_low_type() -> None:
    torch = pytest.importorskip("torch")
    assert low_type(torch.float16) is DType.FLOAT16
    assert low_type(torch.bfloat16) is DType.BFLOAT16
    assert convert(NET, to=torch.bfloat16).report.model.to == "bfloat16"


def test_every_form_of_a_type_converts() -> None:
    assert convert(NET, to=np.float16).report.to_json() == convert(NET).report.to_json()
    assert convert(NET, to=None).report.to_json() == convert(NET).report.to_json()
    assert calibrate(NET, DATA, to=ml_dtypes.bfloat16).to == "bfloat16"


FORMS = "use float16 (f16, fp16, half), bfloat16 (bf16), mixed_float16 or mixed_bfloat16"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("flaot16", "unknown type or policy 'flaot16'; did you mean 'float16'?"),
        ("mixed_fp16", "unknown type or policy 'mixed_fp16'; did you mean 'mixed_float16'?"),
        ("banana", f"unknown type or policy 'banana'; {FORMS}"),
        (True, f"unknown type or policy True; {FORMS}"),
        (4242, f"unknown type or policy 4242; {FORMS}"),
        ([], f"unknown type or policy []; {FORMS}"),
        (np.float32, "cannot lower to float32; use float16 or bfloat16"),
        (float, "cannot lower to float64; use float16 or bfloat16"),
        (ml_dtypes.float8_e4m3fn, "cannot lower to float8e4m3fn; use float16 or bfloat16"),
        (onnx.TensorProto.INT8, "cannot lower to int8; use float16 or bfloat16"),
    ],
)
def test_what_is_not_a_low_type_is_refused(to: Any, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        convert(NET, to=to)
    assert str(error.value) == message


def test_none_stands_for_the_default_of_every_keyword() -> None:
    options: dict[str, Any] = dict.fromkeys(request.KEYWORDS)
    assert convert(NET, headroom=None, **options).report == convert(NET).report  # type: ignore[arg-type]
    near: dict[str, Any] = {"rtol": 0.1, "outputs": None, "equal_nan": None, "emulate": None}
    assert verify(NET, NET, DATA, **near) == verify(NET, NET, DATA, rtol=0.1)
    none: dict[str, Any] = dict.fromkeys(("rtol", "budget", "headroom", "progress"))
    assert repair(NET, DATA, atol=1, **none, **options).report == repair(NET, DATA, atol=1).report


TEXTS = "text or a list of text"


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("keep", 5, f"keep=5 is int; give {TEXTS}"),
        ("lower", [1, 2], f"lower=[1, 2] is list; give {TEXTS}"),
        ("io", {"x": "float16"}, f"io={{'x': 'float16'}} is dict; give {TEXTS}"),
        ("headroom", "2", "headroom='2' is str; give a number"),
        ("folder", 3, "folder=3 is int; give text, a path or None"),
        ("ranges", 3, "ranges=3 is int; give a Ranges, text, a path or None"),
        ("level", 3, "unknown value 3 for level; use one of default, tensor-cores-only, treat-gray-as-deny, "
         "unsafe-force-all, lower-all"),
        ("lists", 3, "lists=3 is int; give the path of a YAML file, a mapping or a shipped name, or a list of these"),
        ("rtol", "1e-2", "rtol='1e-2' is str; give a number or None"),
        ("atol", True, "atol=True is bool; give a number or None"),
        ("equal_nan", "no", "equal_nan='no' is str; give True or False"),
        ("outputs", 3, "outputs=3 is int; give a list of text or text"),
        ("progress", 1, "progress=1 is int; give a function or None"),
        ("metric", 3, "unknown metric '3'; use one of cosine, snr, top1, scaled with a bound"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_an_error_with_its_keyword(keyword: str, value: Any, message: str) -> None:
    of_verify = keyword in ("rtol", "atol", "equal_nan", "outputs", "progress", "metric")
    with pytest.raises(PolicyError) as error:
        verify(NET, NET, DATA, **{keyword: value}) if of_verify else convert(NET, **{keyword: value})
    assert str(error.value) == message


def test_a_keyword_is_spelled_as_its_user_writes_it() -> None:
    words = (("metric",), ("rtol", -1.0), ("overwrite", True), ("opset", "auto"), ("external_data", True))
    assert [spelled(*word) for word in words[:4]] == ["metric=", "rtol=-1.0", "overwrite=True", "opset='auto'"]
    with options_spelled(("overwrite", "opset", "metric")):
        shown = [spelled(*word) for word in words]
    assert shown == ["--metric", "--set rtol=-1.0", "--overwrite", "--opset auto", "--set external-data=true"]
    assert spelled("metric") == "metric="


@pytest.mark.parametrize("keyword", ["overwrite", "external_data"])
def test_save_checks_its_keywords(keyword: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for result in (convert(NET), repair(NET, DATA, atol=1)):
        path.write_bytes(b"kept")
        with pytest.raises(PolicyError, match=f"^{keyword}='no' is str; give True"):
            result.save(path, **{"overwrite": True, keyword: "no"})  # type: ignore[arg-type]
        assert path.read_bytes() == b"kept"
        result.save(path, overwrite=True, external_data=None)
