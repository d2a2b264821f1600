"""Options of a conversion: their precedence in files, variables, keywords and command line, and refused values."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from amp_rewrite import DType, Policy, PolicyError, calibrate, convert, repair, verify
from amp_rewrite.cli.parameters import from_file, settings
from amp_rewrite.errors import ConfigError, option_spelling, spelled
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.settings import request
from amp_rewrite.settings.choices import Target, low_type
from amp_rewrite.settings.option import Options
from amp_rewrite.settings.request import KEYWORDS, OPTIONS, Request, from_environment
from support.paths import ROOT


def written(folder: Path, text: str, name: str = "amp.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_sets_every_option(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        to = "bfloat16"
        lists = ["tensorflow", "mine.yaml"]
        level = "tensor-cores-only"
        target = "onnx"
        safety = "none"
        keep = ["op=Softmax"]
        lower = ["scope=encoder/*", "op=Exp"]
        io = "low"
        external_data = true
        overwrite = true
        fail-on = ["lowered", "casts"]
        fuse = "none"
        opset = 21
        ranges = "ranges.json"
        headroom = 4
        data = "batches"
        """,
    )

    found = settings({}, {}, config=file)
    assert found.config.startswith("to = bfloat16, lists = tensorflow mine.yaml, level = tensor-cores-only, ")
    assert found.config.endswith(f"ranges = ranges.json, headroom = 4, data = batches, from {file.name}")
    assert replace(found, config="") == Request(
        to=DType.BFLOAT16,
        lists=("tensorflow", str(tmp_path / "mine.yaml")),
        level="tensor-cores-only",
        target=Target.ONNX,
        safety="none",
        keep=("op=Softmax",),
        lower=("scope=encoder/*", "op=Exp"),
        io=("low",),
        external_data=True,
        overwrite=True,
        fail_on=("lowered", "casts"),
        fuse="none",
        opset=21,
        ranges=str(tmp_path / "ranges.json"),
        headroom=4.0,
        data=str(tmp_path / "batches"),
    )


def test_the_command_line_overrides_the_environment_and_that_the_file(tmp_path: Path) -> None:
    written(tmp_path, 'level = "lower-all"\nto = "bfloat16"\ntarget = "onnx"\noverwrite = true\nlists = ["a.yaml"]\n')
    environ = {"AMP_REWRITE_LEVEL": "unsafe-force-all", "AMP_REWRITE_LISTS": f"b.yaml{os.pathsep}c.yaml"}

    found = settings({"to": "float16", "keep": (), "overwrite": None}, environ, folder=tmp_path)

    assert found == Request(
        level="unsafe-force-all",
        target=Target.ONNX,
        overwrite=True,
        lists=("b.yaml", "c.yaml"),
        config="target = onnx, overwrite = true, from amp.toml",
    )
    assert settings({"level": "default"}, environ, folder=tmp_path).level == "default"
    assert settings({"lists": ("d.yaml",)}, environ, folder=tmp_path).lists == ("d.yaml",)


def test_the_environment_sets_level_and_lists() -> None:
    assert from_environment(
        {"AMP_REWRITE_LEVEL": "TREAT_GRAY_AS_DENY", "AMP_REWRITE_LISTS": f"{os.pathsep}a.yaml"}
    ) == {"level": "TREAT_GRAY_AS_DENY", "lists": ("a.yaml",)}
    assert from_environment({"AMP_REWRITE_LEVEL": "", "AMP_REWRITE_LISTS": "", "PATH": "/bin"}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('to = "float16"\nkep = ["a"]\n', "unknown key 'kep'; did you mean 'keep'?"),
        ("'colour' = 1\n", "unknown key 'colour'; use one of " + ", ".join(row.key for row in OPTIONS.values())),
        ("fail_onn = []\n", "unknown key 'fail_onn'; did you mean 'fail-on'?"),
        ("to = 1.5\n", "unknown type or policy 1.5; use float16 (f16, fp16, half), bfloat16 (bf16), "
         "mixed_float16 or mixed_bfloat16"),
        ("keep = [1]\n", "keep must be a list of strings, not [1]"),
        ("lists = {a = 1}\n", "lists must be a list of strings, not {'a': 1}"),
        ("to = 2020-01-01\n", "to must be a string, a number, true or false, not datetime.date(2020, 1, 1)"),
        ('overwrite = "yes"\n', "overwrite='yes' must be True or False, not str"),
        ('level = "deafult"\n', "unknown value 'deafult' for level; did you mean 'default'?"),
        ("headroom = true\n", "headroom=True must be a number, not bool"),
        ("headroom = 1\n", "a headroom of 1 is not a finite number above 1; use a number such as 2"),
        ("headroom = inf\n", "a headroom of inf is not a finite number above 1; use a number such as 2"),
        (f"headroom = {10**400}\n", "a headroom of inf is not a finite number above 1; use a number such as 2"),
        ("data = 1\n", "data=1 must be a string or a path, not int"),
        ("to = \n", "not valid TOML: Invalid value (at line 1, column 6); correct it (strings need quotes)"),
        ("a = " + "[" * 9999, "not valid TOML: maximum recursion depth exceeded"),
        ("# " + "x" * (1 << 16), "it is larger than 64 KiB, so it is not a TOML file; name another file"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_a_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        from_file(file)

    assert str(caught.value).startswith(f"{file}: {message}")


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings({}, {}, config=tmp_path / "none.toml")
    reason = "No such file or directory; pass the path of a TOML file"
    assert str(caught.value) == f"cannot read {tmp_path}/none.toml: {reason}"

    (tmp_path / "latin.toml").write_bytes(b'to = "\xe9"')
    with pytest.raises(ConfigError) as caught:
        settings({}, {}, config=tmp_path / "latin.toml")
    assert str(caught.value) == f"{tmp_path}/latin.toml is not UTF-8; save it as UTF-8"


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*pipe\.toml: it is not a regular file; pass the path"):
        settings({}, {}, config=tmp_path / "pipe.toml")


def test_an_unknown_choice_names_its_environment_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^AMP_REWRITE_LEVEL: unknown value 'x' for level; use one of default, "):
        settings({}, {"AMP_REWRITE_LEVEL": "x"}, folder=tmp_path)


DEFAULTS = {name: option.default for name, option in KEYWORDS.items()}


def test_each_option_has_a_type_and_a_default() -> None:
    assert DEFAULTS.keys() == Options.__annotations__.keys() == Options.__optional_keys__


def test_a_request_reads_each_setting_once() -> None:
    request = Request(to="bf16", keep="op=Softmax", opset="21", fail_on=("raised,casts",))  # type: ignore[arg-type]
    assert (request.to, request.keep, request.opset) == (DType.BFLOAT16, ("op=Softmax",), 21)
    assert request.fail_on == ("raised", "casts")
    assert replace(request, keep=()) == Request(to=DType.BFLOAT16, opset=21, fail_on=("raised", "casts"))


def test_a_request_reports_the_stages_of_a_conversion() -> None:
    stages: list[tuple[str, int, int]] = []
    request = Request.of(progress=lambda *stage: stages.append(stage))
    Draft.of(ROOT / "examples" / "models" / "digits_cnn.onnx", request)
    assert stages == [("read", 0, 1), ("decide", 0, 1)]
    assert request == Request.of()


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
        (Policy, f"unknown type or policy {Policy!r}; {FORMS}"),
        (np.float32, "cannot lower to float32; use float16 or bfloat16"),
        (float, "cannot lower to float64; use float16 or bfloat16"),
        (ml_dtypes.float8_e4m3fn, "cannot lower to float8e4m3fn; use float16 or bfloat16"),
        (onnx.TensorProto.INT8, "cannot lower to int8; use float16 or bfloat16"),
    ],
)
def test_other_types_are_refused(to: Any, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        convert(NET, to=to)
    assert str(error.value) == message


def test_none_means_the_default_of_every_keyword() -> None:
    options: dict[str, Any] = dict.fromkeys(request.KEYWORDS)
    assert convert(NET, headroom=None, **options).report == convert(NET).report  # type: ignore[arg-type]
    near: dict[str, Any] = {"rtol": 0.1, "outputs": None, "equal_nan": None, "emulate": None}
    assert verify(NET, NET, DATA, **near) == verify(NET, NET, DATA, rtol=0.1)
    none: dict[str, Any] = dict.fromkeys(("rtol", "budget", "headroom", "progress"))
    assert repair(NET, DATA, atol=1, **none, **options).report == repair(NET, DATA, atol=1).report


TEXTS = "a string or a list of strings"


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("keep", 5, f"keep=5 must be {TEXTS}, not int"),
        ("lower", [1, 2], f"lower=[1, 2] must be {TEXTS}, not list"),
        ("io", {"x": "float16"}, f"io={{'x': 'float16'}} must be {TEXTS}, not dict"),
        ("headroom", "2", "headroom='2' must be a number, not str"),
        ("folder", 3, "folder=3 must be a string, a path or None, not int"),
        ("ranges", 3, "ranges=3 must be a Ranges, a string, a path or None, not int"),
        ("level", 3, "unknown value 3 for level; use one of default, tensor-cores-only, treat-gray-as-deny, "
         "unsafe-force-all, lower-all"),
        ("lists", 3, "lists=3 must be the path of a YAML file, a mapping, a shipped name, or a list of these, not int"),
        ("rtol", "1e-2", "rtol='1e-2' must be a number or None, not str"),
        ("atol", True, "atol=True must be a number or None, not bool"),
        ("equal_nan", "no", "equal_nan='no' must be True or False, not str"),
        ("outputs", 3, "outputs=3 must be a list of strings or a string, not int"),
        ("progress", 1, "progress=1 must be a function or None, not int"),
        ("metric", 3, "unknown metric '3'; use one of cosine, snr, top1, scaled with a bound"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_an_error_with_its_keyword(keyword: str, value: Any, message: str) -> None:
    of_verify = keyword in ("rtol", "atol", "equal_nan", "outputs", "progress", "metric")
    with pytest.raises(PolicyError) as error:
        verify(NET, NET, DATA, **{keyword: value}) if of_verify else convert(NET, **{keyword: value})
    assert str(error.value) == message


def test_an_option_is_spelled_as_its_user_writes_it() -> None:
    words = (("metric",), ("rtol", -1.0), ("overwrite", True), ("opset", "auto"), ("external_data", True))
    assert [spelled(*word) for word in words[:4]] == ["metric=", "rtol=-1.0", "overwrite=True", "opset='auto'"]
    with option_spelling(("overwrite", "opset", "metric")):
        spellings = [spelled(*word) for word in words]
    assert spellings == ["--metric", "--set rtol=-1.0", "--overwrite", "--opset auto", "--set external-data=true"]
    assert spelled("metric") == "metric="


@pytest.mark.parametrize("keyword", ["overwrite", "external_data"])
def test_save_checks_its_keywords(keyword: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for result in (convert(NET), repair(NET, DATA, atol=1)):
        path.write_bytes(b"kept")
        with pytest.raises(PolicyError, match=f"^{keyword}='no' must be True"):
            result.save(path, **{"overwrite": True, keyword: "no"})  # type: ignore[arg-type]
        assert path.read_bytes() == b"kept"
        result.save(path, overwrite=True, external_data=None)
