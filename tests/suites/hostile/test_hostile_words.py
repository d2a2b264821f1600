"""Broken or hostile op lists, reports, patterns and names."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from amp_rewrite.errors import ListError, PatternError, ReportError
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import Totals
from amp_rewrite.settings.op_lists import load_lists
from suites.fuzz.cage import Cage
from suites.hostile.given import attempt, sound

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits of the sandbox need Linux")

# -- op lists ---------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
LISTS = {
    "a billion laughs": LAUGHS,
    "endlessly nested": "allow: " + "[" * 100_000,
    "a tag": "allow: !!python/object/apply:os.system ['touch owned']\n",
    "an op of escape sequences": 'allow: ["\\e[31mMatMul"]\n',
    "an op of a megabyte": "allow: [" + "M" * 900_000 + "]\n",
}


HEAVY = {"a billion laughs", "endlessly nested"}
"""Lists that exhaust a careless parser; these are read in the sandbox."""


@pytest.mark.parametrize("name", LISTS)
def test_a_malformed_list_is_refused(request: pytest.FixtureRequest, folder: Path, name: str) -> None:
    content, path = LISTS[name], folder / "l.yaml"
    path.write_text(content)
    if name in HEAVY:
        outcome = attempt(request.getfixturevalue("cage"), folder, "explain", "MatMul", "--lists", "l.yaml")
        assert outcome.refused and "l.yaml" in outcome.err and len(outcome.err) < 2000, outcome
    else:
        with pytest.raises(ListError, match=r"l\.yaml"):
            load_lists("float16", [path])
    assert not Path("owned").exists() and not (folder / "owned").exists()


# -- reports ----------------------------------------------------------------------------------------------------


def report(**change: object) -> dict[str, object]:
    totals = dict.fromkeys((field.name for field in fields(Totals)), 0)
    row = {"name": "a", "op": "Relu", "dtype": "float32"}
    sound: dict[str, object] = {
        "schema": 1,
        "model": {"name": "m.onnx", "ir_version": 10, "opsets": {"ai.onnx": 21}},
        "totals": totals,
        "weights": {},
        "findings": [],
        "inputs": [],
        "outputs": [],
        "casts": [],
        "baked": [],
        "rows": [row],
    }
    return sound | change


def rows(**change: object) -> str:
    return json.dumps(report(rows=[{"name": "a", "op": "Relu", "dtype": "float32", **change}]))


REPORTS: dict[str, str | bytes] = {
    "nothing": "",
    "an empty object": "{}",
    "endlessly nested lists": "[" * 200_000,
    "an endlessly nested field": '{"schema": 1, "rows": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "NaN": rows(because_row=0).replace(': 0, "float_ops"', ': NaN, "float_ops"'),
    "Infinity": rows().replace('"ir_version": 10', '"ir_version": Infinity'),
    "not UTF-8": b'{"schema": 1, "\xff": 2}',
    "UTF-16": json.dumps(report()).encode("utf-16"),
    "a NUL": b"\0" + json.dumps(report()).encode(),
    "another schema": json.dumps(report(schema=2)),
    "rows that are an object": json.dumps(report(rows={})),
    "a row without a name": json.dumps(report(rows=[{"op": "Relu", "dtype": "float32"}])),
    "a name that is a list": rows(name=["a"]),
    "a row that reads itself": rows(reads=[0]),
    "a row that reads a later one": rows(reads=[7]),
    "a reason in a missing row": rows(because_row=9),
    "variables that are a list": rows(variables=["T"]),
    "a cast after a missing row": json.dumps(
        report(casts=[{"value": "v", "from": "float32", "to": "float16", "after": 5}])
    ),
    "no inputs": json.dumps({name: part for name, part in report().items() if name != "inputs"}),
    "a row that reads a missing input": rows(reads=[-9]),
    "a model file": sound().SerializeToString(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_malformed_report_is_refused(request: pytest.FixtureRequest, folder: Path, name: str) -> None:
    content = REPORTS[name]
    if "endlessly nested" in name:  # a deep recursion may crash the process
        (folder / "r.json").write_text(str(content))
        outcome = attempt(request.getfixturevalue("cage"), folder, "report", "r.json")
        assert outcome.refused and "r.json" in outcome.err and len(outcome.err) < 1000, outcome
    else:
        with pytest.raises(ReportError, match=r"r\.json") as refusal:
            Report.from_json(content, "r.json")
        assert len(str(refusal.value)) < 1000


def test_circular_reasons_come_to_an_end(cage: Cage, folder: Path) -> None:
    model = {"name": "m", "ir_version": 10, "opsets": {}, "to": "float16"}
    row = {"op": "Relu", "dtype": "float32", "rule": "deny_forward"}
    ring = [{**row, "name": "a", "because_row": 1}, {**row, "name": "b", "because_row": 0}]
    (folder / "r.json").write_text(json.dumps(report(model=model, rows=ring)))

    assert attempt(cage, folder, "explain", "r.json", "a").out.count("because b") == 1


# -- patterns ---------------------------------------------------------------------------------------------------

PATTERNS = (
    "", "=", "re:(", "op=", "feeds=\0", "a" * 100_000, "re:" + "(" * 10_000, "re:(?:a{1000}){1000}{1000}", "\udcff",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: repr(pattern[:20]))
def test_a_malformed_pattern_is_refused(folder: Path, pattern: str) -> None:
    with pytest.raises(PatternError):
        convert(folder / "m.onnx", keep=pattern)


# -- names ------------------------------------------------------------------------------------------------------

COMMANDS = ("::error::no", "  ::set-env name=PATH::x", "##[command]rm", "a ##vso[task.setvariable]x", "##teamcity[x")
EVIL = "\x1b]0;owned\x07\x1b[31m\u202e\n::error::no\r\x85\u2028%0A|`<b>"


def evil_model(last: str = "Exp") -> ModelProto:
    """Build a model with only evil names, some of which start with commands of CI runners."""
    first, own, graph_name, hidden, y = (f"{command}{EVIL}" for command in COMMANDS)
    nodes = [
        helper.make_node("MatMul", [f"x{EVIL}", f"w{EVIL}"], [hidden], name=first),
        helper.make_node(f"Own{EVIL}", [hidden], [f"o{EVIL}"], name=own, domain=f"d{EVIL}"),
        helper.make_node(last, [hidden], [y], name=f"last{EVIL}"),
    ]
    graph = helper.make_graph(
        nodes,
        graph_name,
        [helper.make_tensor_value_info(f"x{EVIL}", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)],
        [helper.make_tensor(f"w{EVIL}", TensorProto.FLOAT, [4, 3], [1e9] * 12)],
        value_info=[helper.make_tensor_value_info(f"o{EVIL}", TensorProto.FLOAT, [f"n{EVIL}"])],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(f"d{EVIL}", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def commands_in(text: str) -> list[str]:
    """Return lines that GitHub, Azure or TeamCity would interpret as a command."""
    marks = ("##[", "##vso[", "##teamcity[")
    return [line for line in text.splitlines() if line.strip().startswith("::") or any(m in line for m in marks)]


FORMS = ("text", "json", "markdown", "github")


@pytest.mark.slow
def test_no_name_injects_commands_into_a_terminal_or_a_workflow(cage: Cage, folder: Path) -> None:
    other = f"n{EVIL.replace('/', '')}.onnx"
    runs = evil_model("Softmax")
    del runs.graph.node[1]  # unknown to every runtime
    for name, model in (("m.onnx", evil_model()), (other, evil_model("Softmax")), ("runs.onnx", runs)):
        onnx.save(model, folder / name)
    lines: list[tuple[str, ...]] = [
        *(("report", "m.onnx", "-v"), ("report", "m.onnx", "--json"), ("doctor", "m.onnx")),
        *(("m.onnx", "-v", "--report", "r.json"), (other, "-v", "--overwrite"), ("m.onnx", "--json", "--dry-run")),
        *((f"nowhere{EVIL}",), ("m.onnx", f"--keep={EVIL}"), ("m.onnx", "--keep", COMMANDS[4])),
        *(("explain", place, f"#{i}") for place in ("m.onnx", "r.json") for i in range(2)),
        *(("explain", "m.onnx", EVIL), ("explain", EVIL), ("m.onnx", "--lists", EVIL)),
        *(("runs.onnx", "-o", "half.onnx"), ("locate", "runs.onnx", "half.onnx", "--random")),
        ("verify", "runs.onnx", "half.onnx", "--random", "--set", "rtol=1"),
        ("verify", "runs.onnx", "half.onnx", "--random", "--set", "rtol=1", "--only", COMMANDS[3]),
        *(("diff", "m.onnx", place, "--format", form) for place in (other, "r.json") for form in FORMS),
    ]
    outcomes = {words: attempt(cage, folder, *words) for words in lines}
    assert {outcome.code for outcome in outcomes.values()} == {0, 1, 2}
    for words, outcome in outcomes.items():
        for text in (outcome.out, outcome.err):
            assert all(line.isprintable() for line in text.split("\n")), text
            commands = commands_in(text)
            ours = ("::warning title=", "::error title=", "::notice::no difference")
            assert all(words[-1] == "github" and line.startswith(ours) for line in commands), (words, commands)
