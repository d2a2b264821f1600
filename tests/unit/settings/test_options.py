"""The options of a conversion: stated once, shown wherever they are taken."""

from __future__ import annotations

import inspect
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from amp_rewrite import convert, repair, verify
from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.settings.option import CriterionKeywords, Options
from amp_rewrite.settings.request import CRITERION, KEYWORDS, Request
from support.paths import ROOT

DEFAULTS = {name: option.default for name, option in KEYWORDS.items()}


def test_each_option_has_a_type_and_a_default() -> None:
    assert DEFAULTS.keys() == Options.__annotations__.keys() == Options.__optional_keys__


@pytest.mark.parametrize("function", [convert, repair])
def test_a_function_that_takes_options_shows_them(function: Callable[..., object]) -> None:
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in DEFAULTS} == DEFAULTS
    assert {name: shown[name].annotation for name in ("to", "fuse")} == {
        "to": "LowType | None",
        "fuse": "Fuse | None",
    }
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in shown.values())


@pytest.mark.parametrize("function", [verify, repair])
def test_verify_and_repair_show_the_keywords_of_a_criterion(function: Callable[..., object]) -> None:
    shown = inspect.signature(function).parameters
    types = {name: text.__forward_arg__ for name, text in CriterionKeywords.__annotations__.items()}

    assert {name: (shown[name].annotation, shown[name].default) for name in CRITERION} == {
        name: (text, None) for name, text in types.items()
    }
    lines = (inspect.getdoc(function) or "").splitlines()
    assert all(f"{name}: {row.doc}." in lines for name, row in CRITERION.items())


# -- the table -------------------------------------------------------------------------------------------


def test_a_request_reads_what_is_stated_once() -> None:
    request = Request(to="bf16", keep="op=Softmax", opset="21", fail_on=("raised,casts",))  # type: ignore[arg-type]
    assert (request.to, request.keep, request.opset) == (DType.BFLOAT16, ("op=Softmax",), 21)
    assert request.fail_on == ("raised", "casts")
    assert replace(request, keep=()) == Request(to=DType.BFLOAT16, opset=21, fail_on=("raised", "casts"))


def test_a_request_tells_of_the_stages_of_a_conversion() -> None:
    told: list[tuple[str, int, int]] = []
    request = Request.of(progress=lambda *stage: told.append(stage))
    Draft.of(ROOT / "examples" / "models" / "digits_cnn.onnx", request)
    assert told == [("read", 0, 1), ("decide", 0, 1)]
    assert request == Request.of()


def test_the_page_of_options_is_generated() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "build_options.py"))["page"]()
    assert (ROOT / "docs" / "reference" / "options.md").read_text("utf-8") == page


FIELD = """    sparkle: str = option(
        "a",
        "how it sparkles",
        metavar="a|b",
        help="How it sparkles.",
        stated=UNUSUAL,
        environment="AMP_REWRITE_SPARKLE",
    )
"""
TYPE = "    sparkle: str | None\n"
USES = """
import inspect, os, runpy, sys
from pathlib import Path
import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.reports.report import Report
from amp_rewrite.settings.config_file import from_file, settings

model, page = sys.argv[1:]
print(inspect.signature(amp_rewrite.convert).parameters["sparkle"].default)
Path("amp.toml").write_text("sparkle = 'b'")
print(from_file(Path("amp.toml"))["sparkle"], settings({"sparkle": "c"}, {}).sparkle)
converted = amp_rewrite.convert(model, sparkle="b")
print([p.value.partition("sparkle=")[2] for p in converted.model.metadata_props if p.key == "amp_rewrite"])
print(Report.from_json(converted.report.to_json(), "r").model.sparkle, "sparkle b" in converted.report.text())
print(amp_rewrite.convert(model).report.model.sparkle)
os.environ["AMP_REWRITE_SPARKLE"] = "e"
print(amp_rewrite.convert(model, sparkle=None).report.model.sparkle)
print("AMP_REWRITE_SPARKLE" in runpy.run_path(page)["page"]())
program.main(["convert", "--help"])
"""


def test_a_field_and_its_type_are_enough_for_an_option_to_appear_everywhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "amp_rewrite", tmp_path / "amp_rewrite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "lists", tmp_path / "lists")
    settings = tmp_path / "amp_rewrite" / "settings"
    for name, marker, added in (("request", "    external_data: bool", FIELD), ("option", "    shift: Literal", TYPE)):
        source = (settings / f"{name}.py").read_text("utf-8")
        assert source.count(marker) == 1
        (settings / f"{name}.py").write_text(source.replace(marker, added + marker), "utf-8")
    words = (str(ROOT / "examples" / "models" / "digits_cnn.onnx"), str(ROOT / "tools" / "build_options.py"))
    done = subprocess.run(
        [sys.executable, "-c", USES, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:7] == ["a", "b c", "['b']", "b True", "None", "e", "True"]
    assert any("--sparkle a|b" in line and "How it sparkles." in line for line in lines)
