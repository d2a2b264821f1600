"""The options of a conversion: stated once, shown wherever they are taken."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from dataclasses import replace

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
    assert {name: shown[name].annotation for name in ("to", "fuse")} == {"to": "LowType | None", "fuse": "Fuse | None"}
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
