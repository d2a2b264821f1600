"""Results: one-line repr, text as str, HTML for notebooks, dictionaries, and composition."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite import (
    Model,
    PatternError,
    PolicyError,
    bench,
    calibrate,
    convert,
    diff,
    explain,
    locate,
    repair,
    verify,
)
from amp_rewrite.deploy.benchmark import Benchmark
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result

EVIL = "<script>alert(1)</script>\x1b[2J"
DATA = {"x": np.ones((2, 8), np.float32)}


def net(name: str = "first") -> ModelProto:
    weights = ", ".join(["0.5"] * 64)
    text = (
        '<ir_version: 10, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] y)'
        f" <float[8, 8] w = {{{weights}}}, float[8, 8] v = {{{weights}}}>"
        " { [first] a = MatMul (x, w) [big] b = Exp (a) [soft] s = Softmax (b) [tail] t = Softmax (b)"
        " [sum] u = Add (s, t)"
        " [second] y = MatMul (u, v) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = name
    model.graph.name = name
    return model


def named(found: Benchmark, name: str) -> Benchmark:
    return replace(
        found,
        entries=tuple(replace(e, name=name, speed_ups={name: s}) for e in found.entries for s in e.speed_ups.values()),
    )


@cache
def results(name: str) -> dict[str, Result]:
    model = net(name)
    converted = convert(model)
    return {
        "Converted": converted,
        "Report": converted.report,
        "Verdict": verify(model, converted, DATA, rtol=0.5),
        "Located": locate(model, converted, DATA),
        "Ranges": calibrate(model, DATA),
        "Delta": diff(model, converted),
        "Repaired": repair(model, DATA, rtol=0.5, atol=0.5),
        "Explanation": explain(converted, name),
        "Benchmark": named(bench([model], DATA, rounds=3, memory=False), name),
    }


KINDS = ("Converted", "Report", "Verdict", "Located", "Ranges", "Delta", "Repaired", "Explanation", "Benchmark")


@pytest.mark.parametrize("kind", KINDS)
def test_repr_is_one_short_line_and_str_is_the_text(kind: str) -> None:
    result = results("first")[kind]
    assert repr(result).startswith(f"<{kind} ") and repr(result).endswith(">")
    assert repr(result).isprintable() and len(repr(result)) < 200
    assert str(result) == result.text()


@pytest.mark.parametrize("kind", KINDS)
def test_html_contains_the_text_and_escapes_hostile_names(kind: str) -> None:
    result = results(EVIL)[kind]
    html = result._repr_html_()
    assert html.removeprefix("<pre>").removesuffix("</pre>") == escape(
        "\n".join(map(plain, result.text().splitlines()))
    )
    assert "\x1b" not in html + repr(result)


def test_a_repair_has_model_report_and_save(tmp_path: Path) -> None:
    repaired = repair(net(), DATA, rtol=0.5, atol=0.5)
    assert repaired.report is repaired.converted.report
    assert repaired.model == repaired.converted.model
    repaired.save(tmp_path / "out.onnx")
    assert Model.load(tmp_path / "out.onnx").to_proto() == repaired.model


def test_diff_accepts_paths_models_results_and_reports(tmp_path: Path) -> None:
    model, converted = net(), convert(net())
    onnx.save(model, tmp_path / "a.onnx")
    converted.save(tmp_path / "b.onnx")
    (tmp_path / "r.json").write_text(converted.report.to_json(), "utf-8")
    expected = diff(model, converted).counts
    assert expected["lowered"] == 2
    assert diff(str(tmp_path / "a.onnx"), tmp_path / "r.json").counts == expected
    assert diff(tmp_path / "a.onnx", repair(model, DATA, tolerance=1)).counts == expected
    assert diff(Report.from_json(converted.report.to_json(), "r"), converted).differs is False
    assert diff(tmp_path / "a.onnx", tmp_path / "b.onnx").counts["lowered"] == 2
    assert diff(tmp_path / "a.onnx", tmp_path / "b.onnx").a == "a.onnx"


# -- find and explain -----------------------------------------------------------------------------------------


def test_rows_are_found_by_name_type_and_pattern() -> None:
    report = convert(net()).report
    for query, names in {
        "soft": ["soft"],
        "#1": ["big"],
        "Softmax": ["soft", "tail"],
        "op=Softmax": ["soft", "tail"],
        "s*": ["soft", "sum", "second"],
        "re:^s.{3}$": ["soft"],
        "op=Softmax,name=t*": ["tail"],
        "scope=first": ["first"],
    }.items():
        assert [row.name for row in report.find(query)] == names, query
    for query, message in {
        "sotf": "first: no op has the name or type 'sotf'; did you mean 'soft'?",
        "softmax": "first: no op has the name or type 'softmax'; did you mean 'Softmax', 'soft'?",
        "op=Conv": "first: no op has the name or type 'op=Conv'; name an op, an op type, or a pattern such as"
        " op=MatMul",
        "feeds=Exp": "pattern 'feeds=Exp': a report does not have the key 'feeds'; use name, op or scope",
    }.items():
        with pytest.raises(PatternError) as error:
            report.find(query)
        assert str(error.value) == message


def test_explain_accepts_models_results_and_reports(tmp_path: Path) -> None:
    converted = convert(net())
    onnx.save(net(), tmp_path / "net.onnx")
    (tmp_path / "r.json").write_text(converted.report.to_json(), "utf-8")
    text = explain(converted, "soft").text()
    assert text.startswith("soft (Softmax) is float32: ")
    assert [str(explain(of, "soft")) for of in (net(), converted.report, tmp_path / "r.json")] == [text] * 3
    assert str(explain(net(), "soft", keep="soft")) != text
    with pytest.raises(PolicyError, match="keep: the conversion is done; leave the options out, or explain the model"):
        explain(converted, "soft", keep="soft")
    with pytest.raises(PatternError, match="nothing to explain; name an op, an op type or a value"):
        explain(converted)


def test_explain_accepts_types_inputs_outputs_and_several_names() -> None:
    converted = convert(net())
    alike = explain(converted, "Softmax").text()
    assert alike.startswith("soft (Softmax) is float32: ")
    assert alike.replace("    and 1 more like it: tail\n", "", 1) == explain(converted, "soft").text() != alike
    assert explain(converted, "op=Softmax").text() == alike
    of_input = explain(converted, "x")
    assert of_input.text() == f"x is an input of the model, float32, read by\n{explain(converted, 'first')}"
    assert (
        explain(converted, "y").text() == explain(converted, "second").text() == explain(converted.report, "y").text()
    )
    assert explain(converted, "b").text() == explain(converted, "big").text()
    both = explain(converted, "first", "second")
    assert both.text() == f"{explain(converted, 'first')}\n{explain(converted, 'second')}"
    assert [(chain["asked"], chain["steps"][0]["dtype"]) for chain in both.to_dict()["chains"]] == [
        ("first", "float16"),
        ("second", "float16"),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_results_can_be_copied_and_pickled(kind: str, copied: Callable[[Result], Result]) -> None:
    result = results("first")[kind]
    twin = copied(result)
    assert (twin.text(), twin.to_json()) == (result.text(), result.to_json())
