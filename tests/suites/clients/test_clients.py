"""Other tools before and after a conversion, on some of the shipped models. `make clients` takes all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from suites.clients.limits import LIMITS, problems, stale
from suites.clients.page import BEGIN, END, limits, table
from suites.clients.tools import TOOLS, Tool
from suites.clients.trial import MODELS, ORDERS, Outcome
from suites.clients.worker import try_in, worker
from support.child import Child
from support.paths import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.slow]
PAGE = ROOT / "docs" / "how-to" / "order-of-tools.md"
SOME = ("digits_cnn",)
FINE = Outcome("onnxslim", "digits_cnn", "after", "usable", error=0.3, low=1.0, low_alone=1.0)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    process = worker()
    yield process
    process.close()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tool", TOOLS.values(), ids=list(TOOLS))
def test_a_tool_beside_the_conversion_gives_usable_models(child: Child, tool: Tool, order: str) -> None:
    if not tool.installed:
        pytest.skip(f"{tool.package} is not installed")
    outcomes = [try_in(child, tool.name, model, order) for model in SOME]
    lines = list(problems(outcomes))
    assert not lines, "\n".join(lines)


def test_the_models_are_the_31_shipped_ones() -> None:
    assert len(MODELS) == 31 and set(SOME) < set(MODELS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "crash", "note": "exit code -11"}, "crash: exit code -11"),
        ({"verdict": "open", "note": "no kernel"}, "open: no kernel"),
        ({"verdict": "wrong", "error": 7.0}, "off by 7 times its bound"),
        ({"low": 0.5}, "50% of compute ops in float16, 100% without the tool"),
        ({"tool": "onnxruntime quantize_static", "kernels_alone": 6}, "0 integer kernels, 6 without the conversion"),
        ({"tool": "onnxruntime session EXTENDED", "verdict": "crash"}, "crash"),
        ({"tool": "onnxruntime quantize_dynamic", "verdict": "wrong", "error": 7.0}, "off by 7"),
    ],
)
def test_what_no_limit_covers_is_a_problem(changes: dict[str, object], words: str) -> None:
    assert list(problems([FINE])) == []
    (line,) = problems([replace(FINE, **changes)])
    assert words in line and FINE.model in line


def test_what_a_limit_covers_is_no_problem_and_shows_that_it_holds() -> None:
    outcome = replace(FINE, tool="onnxruntime session BASIC", low=0.0)
    assert list(problems([outcome])) == []
    assert len(list(stale([]))) == len(LIMITS)
    assert len(list(stale([outcome]))) == len(LIMITS) - 1


def test_a_process_that_dies_costs_one_trial(tmp_path: Path) -> None:
    process = worker()
    try:
        lost, fine = (
            try_in(process, tool, "digits_mlp", "before") for tool in ("no such tool", "onnx version_converter")
        )
    finally:
        process.close()
    assert (lost.verdict, fine.verdict) == ("crash", "usable")
    assert "KeyError: 'no such tool'" in lost.note


def test_the_page_has_every_tool_and_every_limit() -> None:
    measured = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split("|")[1].strip() for line in measured.splitlines() if line.startswith("|")]
    assert rows[2:] == list(TOOLS)
    assert measured.rstrip().endswith(limits())


def test_the_table_counts_what_the_tool_took() -> None:
    rejection = replace(FINE, verdict="tool", model="digits_mlp")
    last = table([FINE, rejection, replace(FINE, order="before", verdict="open")]).splitlines()[-1]
    assert [cell.strip() for cell in last.split("|")][3:6] == ["0 of 1", "1 of 1", "–, 100%"]
