"""Ranges: files, calibration of whole models, and the ops that ranges keep in float32, with their rules."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

import amp_rewrite
from amp_rewrite import Converted, DType, EvidenceError, Feed, Model, Ranges, View, calibrate, convert, emulate
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.ranges import MAX_BYTES, Range, key
from amp_rewrite.files.casting import Fit
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.runtime.runner import Runner, SessionOptions
from support.cases import build
from support.corpus import EXPORTED, KINDS, text_model
from support.paths import ROOT, TESTS

X = Range(count=10, nonfinite=1, absmax=7e4, absmin=1e-9, overflow=2, flushed=1, subnormal=3)
Y = Range(count=4, absmax=2.0, absmin=0.5)
RANGES = Ranges(
    to="float16",
    values={"x": X, "loop/body:y": Y, "z": Range()},
    batches=2,
    origin="d.npz",
    random=False,
    model="net.onnx",
    graph="a" * 64,
    weights="b" * 64,
    untapped={"s": "it is not a tensor but seq(float32); tensors taken from it are measured"},
    tool="0.1.0",
)
TEXT = """{
 "schema": 1,
 "model": "net.onnx",
 "graph": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
 "weights": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
 "tool": "0.1.0",
 "to": "float16",
 "batches": 2,
 "origin": "d.npz",
 "random": false,
 "values": {
  "x": {"count": 10, "nonfinite": 1, "absmax": 70000.0, "absmin": 1e-09, "overflow": 2, "flushed": 1, "subnormal": 3},
  "loop/body:y": {"count": 4, "nonfinite": 0, "absmax": 2.0, "absmin": 0.5, "overflow": 0, "flushed": 0, "subnormal": 0},
  "z": {"count": 0, "nonfinite": 0, "absmax": 0.0, "absmin": 0.0, "overflow": 0, "flushed": 0, "subnormal": 0}
 },
 "untapped": {
  "s": "it is not a tensor but seq(float32); tensors taken from it are measured"
 }
}
"""  # noqa: E501


def test_the_file_has_one_value_per_line_round_trips_and_fits_its_schema() -> None:
    assert RANGES.to_json() == TEXT
    assert Ranges.from_json(TEXT, "r.json") == RANGES
    assert list(Ranges.from_json(TEXT, "r.json").values) == list(RANGES.values)
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((ROOT / "docs" / "reference" / "ranges.schema.json").read_text("utf-8"))
    content = json.loads(TEXT)
    jsonschema.validate(content, schema)
    del content["values"]["x"]["absmin"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_a_saved_file_loads_and_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    RANGES.save(path)
    assert Ranges.load(path) == RANGES
    with pytest.raises(EvidenceError) as error:
        RANGES.save(path)
    assert str(error.value) == f"{path} already exists; name another output, or use overwrite=True"
    os.link(path, tmp_path / "old.json")
    replace(RANGES, batches=3).save(path, overwrite=True)
    assert (Ranges.load(path).batches, Ranges.load(tmp_path / "old.json").batches) == (3, 2)  # replaced, not rewritten
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old.json", "r.json"]


@pytest.mark.parametrize(
    ("place", "fact"),
    [
        ("none/r.json", "cannot write {}: the folder {parent} does not exist; create it first"),
        (".", "cannot write {}: it is a folder; name a file"),
    ],
)
def test_unwritable_paths_are_refused(tmp_path: Path, place: str, fact: str) -> None:
    path = tmp_path / place
    with pytest.raises(EvidenceError) as error:
        RANGES.save(path)
    assert str(error.value) == fact.format(path, parent=path.parent)


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "fact"),
    [
        (lambda d: d.pop("batches"), "the document is missing the field 'batches'; calibrate again"),
        (lambda d: d.update(schema=2), "schema is 2, but this version reads 1; calibrate again"),
        (lambda d: d.update(to="float32"), "to is 'float32', which is not a low type; calibrate again"),
        (lambda d: d.update(to="x" * 99), "to is 'xxxxxxxxxxxxxxxxxxx, which is not a low type; calibrate again"),
        (lambda d: d.update(batches=True), "batches must be an integer, but is true or false; calibrate again"),
        (lambda d: d["values"]["x"].pop("absmin"), "values.x is missing the field 'absmin'; calibrate again"),
        (lambda d: d["values"]["x"].update(count=1.5), "values.x.count must be an integer, but is a number;"
         " calibrate again"),
        (lambda d: d["values"]["x"].update(absmax=-1), "values.x.absmax must be a finite number, 0 or more;"
         " calibrate again"),
        (lambda d: d["values"]["x"].update(absmax=10**400), "values.x.absmax must be a finite number, 0 or more;"
         " calibrate again"),
        (lambda d: d["values"]["x"].update(overflow=11), "values.x counts more than its 10 elements; calibrate again"),
        (lambda d: d["values"]["x"].update(absmin=8e4), "values.x.absmin is larger than its absmax; calibrate again"),
        (lambda d: d["untapped"].update(s=1), "untapped.s must be text, but is an integer; calibrate again"),
        ("[]", "the document must be an object, but is a list; calibrate again"),
        ("[" * 100_000, "the text is nested too deeply, so it is not a ranges file; calibrate again"),
        (TEXT.replace("70000.0", "NaN"), "the text is not JSON (NaN is not a JSON number); calibrate again"),
        (TEXT.replace("70000.0", "1e999"), "values.x.absmax must be a finite number, 0 or more;"
         " calibrate again"),
    ],
)  # fmt: skip
def test_a_file_that_was_tampered_with_is_refused_by_name(edit: Edit | str, fact: str) -> None:
    text = edit
    if callable(edit):
        edit(content := json.loads(TEXT))
        text = json.dumps(content)
    with pytest.raises(EvidenceError) as error:
        Ranges.from_json(text, "r.json")
    assert str(error.value) == f"r.json: {fact}"


def test_missing_and_oversized_files_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    facts = []
    for path in (tmp_path / "none.json", tmp_path, large):
        with pytest.raises(EvidenceError) as error:
            Ranges.load(path)
        facts.append(str(error.value).replace(str(tmp_path), "T"))
    assert facts == [
        "cannot read T/none.json: No such file or directory; name a file written by calibrate",
        "cannot read T: it is not a regular file; name a file written by calibrate",
        "T/large.json is larger than 256 MiB, so it is not a ranges file",
    ]


def test_the_table_shows_no_control_characters_of_a_file() -> None:
    text = replace(RANGES, model="\x1b[31m", origin="\x1b", values={"\x1b]0;x": X}, untapped={"\x1b": "\n"}).text()
    assert "\x1b" not in text


NET = """<ir_version: 10, opset_import: ["" : 20]>
net (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }"""


def net(text: str = NET) -> Model:
    return Model.load(onnx.parser.parse_model(text))


def test_keys_name_bodies_by_their_path() -> None:
    view = View.of(Model.load(text_model("if_in_loop")))
    names = [key(view, value.id) for value in view.values]
    assert {name for name in names if ":" in name} >= {"loop/body:s", "loop/body/choice/then_branch:t"}


def test_ranges_belong_to_one_model() -> None:
    found = fingerprint(net())
    ranges = replace(RANGES, graph=found.graph, weights=found.weights)
    ranges.check(net())
    others = [net(NET.replace("Mul", "Add")), net(NET.replace("{1, 2}", "{1, 3}"))]
    facts = []
    for other in others:
        with pytest.raises(EvidenceError) as error:
            ranges.check(other)
        facts.append(str(error.value))
    assert facts == [
        f"the ranges belong to another model, net.onnx: graph {found.graph[:12]} and "
        f"{fingerprint(others[0]).graph[:12]} differ; calibrate again on this one",
        f"the ranges belong to another model, net.onnx: weights {found.weights[:12]} and"
        f" {fingerprint(others[1]).weights[:12]} differ; calibrate again on this one",
    ]


BATCHES = {name: ROOT / name.replace(".onnx", ".npz") for name in EXPORTED}
PRODUCT = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[n,2] x) => (float[n,2] y) <float[2,2] w = {1, 0.5, -2, 1e-6}> { h = MatMul (x, w) y = Exp (h) }
""")
ONE, TWO = ({"x": np.float32([[1, 2]])}, {"x": np.float32([[3e4, 0], [0, -1e-3]])})


def batch_of(name: str) -> dict[str, NDArray[np.float32]]:
    with np.load(BATCHES[name]) as stored:
        return {key: stored[f"input/{key}"] for key in (k[6:] for k in stored.files if k.startswith("input/"))}


def dumped(view: View, batch: dict[str, NDArray[np.float32]], to: DType) -> dict[str, Range]:
    """Compute the ranges of all floating tensors of the main graph directly from their values."""
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    outputs = {out.name for out in proto.graph.output}
    wanted = {v.name: t.dtype for v, t in zip(view.values, view.types, strict=True) if not v.scope and _float(t)}
    for name, dtype in wanted.items():
        if name not in outputs:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype.code, None))
    found = Runner.open(replace(view.model, proto=proto), SessionOptions(optimized=False)).run(batch, list(wanted))
    return {n: Range().merge(Fit.of([np.asarray(array).reshape(-1)], to)) for n, array in found.items()}


def _float(found: object) -> bool:
    return found is not None and found.container == "tensor" and found.dtype is not None and found.dtype.floating  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [f"tests/models/{name}.onnx" for name in KINDS])
def test_the_ranges_match_the_activations(name: str) -> None:
    path = ROOT / name
    batch = batch_of(name)
    found = calibrate(path, batch)
    view = View.of(Model.load(path))
    expected = dumped(view, batch, DType.FLOAT16)
    assert {k: r for k, r in found.values.items() if ":" not in k or k in expected} == expected
    assert found.untapped == {}


def test_constants_count_once_per_batch() -> None:
    one = calibrate(PRODUCT, ONE).values["w"]
    assert one == Range(4, absmax=2.0, absmin=float(np.float32(1e-6)), subnormal=1)
    assert calibrate(PRODUCT, [ONE, TWO]).values["w"] == one.merge(one)


FUNCTIONS = """
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[n,2] x) => (float[n,2] y, float[n,2] z) <float[2,2] w = {1, 0.5, -2, 1}> {
        a = MatMul (x, w)
        b = Mish (a)
        c = MatMul (b, w)
        d = Selu (c)
        e = MatMul (d, w)
        f = Elu (e)
        y = MatMul (f, w)
        g = Mish (e)
        z = MatMul (g, w)
    }
"""


def test_a_conversion_looks_inside_the_standards_functions() -> None:
    """An op that the runtime computes by its function body is colored as that body, with separate ranges."""
    batch = {"x": np.float32([[1, 2], [-3, 4]])}
    ranges = calibrate(onnx.parser.parse_model(FUNCTIONS), batch)
    for lists in ({}, {"deny": ["Elu"]}, {"deny": ["Mish"]}, {"deny": ["Selu", "Mish"]}):
        found = convert(onnx.parser.parse_model(FUNCTIONS), ranges=ranges, lists=lists)
        assert not [f for f in found.report.findings if f.kind == "unseen"], lists
        view = found.view
        measured = {view.value_name(v.id): ranges.of(view, v.id) for v in view.values}
        kept_rules = dumped(view, batch, DType.FLOAT16)
        constants = {v.name for v in view.values if view.constant(v.id) is not None}
        inside = [name for name in kept_rules if "/" in name and name not in constants]
        assert {name: measured[name] for name in inside} == {name: kept_rules[name] for name in inside}
        assert bool(inside) == ("Mish" not in lists.get("deny", []))


@pytest.mark.parametrize(("to", "io"), [("float16", "keep"), ("bfloat16", "low")])
@pytest.mark.parametrize("name", ["if_ts13", "loop_dynamo21", "gpt2_dynamo18"])
def test_a_half_model_is_measured_in_its_widened_twin(name: str, to: str, io: str) -> None:
    batch = batch_of(f"tests/models/{name}.onnx")
    half = convert(TESTS / "models" / f"{name}.onnx", to=to, io=io, target="onnx").result
    found = calibrate(half, batch, to=to)
    twin = View.of(emulate(half, rounding=False, io="float32"))
    fed = next(iter(Feed.of(batch, twin.model)))
    expected = dumped(twin, fed, DType.parse(to))
    assert {k: r for k, r in found.values.items() if ":" not in k or k in expected} == expected
    view = View.of(half)
    assert [key(view, v.id) for v in view.values if _float(view.types[v.id]) and found.of(view, v.id) is None] == []


def test_an_overflow_in_a_half_model_has_its_true_size() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float16[n] x) => (float16[n] y) {
            a = Constant <value_float = 300.0> ()
            b = Cast <to = 10> (a)
            h = Mul (x, b)
            y = Div (h, b)
        }
    """)
    found = calibrate(model, {"x": np.float16([1000])})
    assert (found.values["h"].absmax, found.values["h"].overflow) == (300_000.0, 1)
    assert found.values["y"].absmax == 1000.0


CHAIN = "a=MatMul(x,w);b=Relu(a);c=MatMul(b,w);d=Relu(c);y=MatMul(d,w)"
WEIGHT = {"w": np.full((8, 8), 0.5, np.float32)}


def chain() -> ModelProto:
    return build(CHAIN, ["y"], constants=WEIGHT)


def mean(terms: int) -> ModelProto:
    constants = {**WEIGHT, "row": np.full((1, 8), 0.5, np.float32), "axes": np.array([0, 1], np.int64)}
    text = "a=MatMul(x,w);m=ReduceMean(a,axes);b=MatMul(m,row);c=MatMul(b,w);y=MatMul(c,w)"
    return build(text, ["y"], constants=constants, shapes={"x": [terms // 8, 8]}, opset=18)


def usual(absmax: float = 1.0, **more: float) -> Range:
    return Range(**{"count": 64, "absmax": absmax, "absmin": min(absmax, 0.1), **more})  # type: ignore[arg-type]


def seen(model: ModelProto, to: str = "float16", **found: Range | float | None) -> Ranges:
    """Build ranges of 1 for every value except the named ones: a Range, an absmax, or None for no range."""
    view = View.of(Model.load(model))
    values: dict[str, Range] = {}
    untapped: dict[str, str] = {}
    for value in view.values:
        dtype = view.dtype(value.id)
        if dtype is not None and dtype.floating:
            size = found.get(value.name, 1.0)
            if size is not None:
                values[key(view, value.id)] = size if isinstance(size, Range) else usual(size)
            else:
                untapped[key(view, value.id)] = "it was not measured"
    of = fingerprint(view.model)
    return Ranges(to, values, 3, "data.npz", False, "net.onnx", of.graph, of.weights, untapped)


def kept_rules(model: ModelProto, ranges: Ranges, **options: object) -> dict[str, str]:
    """Return the rule of each op that stays float32."""
    report = converted(model, ranges, **options).report
    return {row.name: row.rule or "" for row in report.rows if row.dtype == "float32"}


def converted(model: ModelProto, ranges: Ranges, **options: object) -> Converted:
    options = {"target": "onnx", "shift": "none", **options}
    return amp_rewrite.convert(model, ranges=ranges, **options)  # type: ignore[arg-type]


def findings(model: ModelProto, ranges: Ranges, **options: object) -> list[tuple[str, str, str]]:
    found = converted(model, ranges, **options).report.findings
    return [(f.kind, f.subject, f.message) for f in found if f.kind != "calibrated"]


def test_the_report_names_the_data_behind_ranges_even_if_it_is_random() -> None:
    report = converted(chain(), seen(chain())).report
    assert [row.dtype for row in report.rows] == ["float16"] * 5
    assert [(f.kind, f.subject, f.message) for f in report.findings] == [
        ("calibrated", "data.npz", "3 batches, headroom 2")
    ]
    report = converted(chain(), replace(seen(chain()), random=True, origin="random, seed 0")).report
    assert [(f.subject, f.message) for f in report.findings] == [
        (
            "random, seed 0",
            "3 batches, headroom 2; the data is random: calibrate with real data before you rely on these ranges",
        )
    ]


def of(graph: str, **more: object) -> ModelProto:
    return build(graph, ["y"], constants=WEIGHT, **more)


FLUSHED, INFINITE = usual(1.0, flushed=40), usual(1.0, nonfinite=3)
MOVED = of("a=MatMul(x,w);b=Transpose(a);c=Transpose(b);y=MatMul(c,w)")
COPIED = of("a=MatMul(x,w);b=Transpose(a);y=MatMul(b,w)")
SHAPED = of("a=MatMul(x,w);s=Shape(a);b=Relu(a);r=Reshape(b,s);y=MatMul(r,w)")
LOG = of("a=MatMul(x,w);b=Log(a);y=MatMul(b,w)")
GATHER = of("g=Gather(w,i);y=MatMul(g,w)", types={"i": "int"}, shapes={"i": [8]})
HOLE = of("p=MatMul(x,w);s=Sigmoid(p);t=Tanh(p);c=Max(s,t);y=MatMul(c,w)")
NO_HOLE = of("p=MatMul(x,w);s=Sigmoid(p);c=Relu(s);y=MatMul(c,w)")
LOWERED = {"level": "lower-all", "lower": ["op=Log"]}
HELD: dict[str, tuple[ModelProto, dict[str, Range | float | None], dict[str, object], dict[str, str]]] = {
    "an overflow, with what computes with it": (chain(), {"c": 40_000.0}, {}, dict.fromkeys("cd", "overflow")),
    "the largest that fits with a headroom of 2": (chain(), {"a": 32752.0}, {}, {}),
    "one more": (chain(), {"a": 32753.0}, {}, dict.fromkeys("ab", "overflow")),
    "less headroom": (chain(), {"a": 10_000.0}, {}, {}),
    "more headroom": (chain(), {"a": 10_000.0}, {"headroom": 10.0}, dict.fromkeys("ab", "overflow")),
    "what moves an overflow": (MOVED, dict.fromkeys("abc", 1e5), {}, dict.fromkeys("abcy", "overflow")),
    "its shape is no fault of who reads it": (
        SHAPED,
        {"a": 40_000.0},
        {},
        {"a": "overflow", "s": "unpainted", "b": "overflow"},
    ),
    "a tensor among the subnormals": (chain(), {"c": 1e-4}, {}, dict.fromkeys("cd", "underflow")),
    "zeros fit": (chain(), {"c": Range(count=64)}, {}, {}),
    "flushed elements whose logarithm is taken": (LOG, {"a": FLUSHED}, LOWERED, {"a": "underflow"}),
    "flushed elements elsewhere": (chain(), {"a": FLUSHED}, {}, {}),
    "infinities that an op makes": (chain(), dict.fromkeys("abc", INFINITE), {}, dict.fromkeys("ab", "nonfinite")),
    "infinities that it carries": (chain(), dict.fromkeys("xab", INFINITE), {}, {}),
    "a copy of what was seen": (COPIED, {"b": None}, {}, {}),
    "what was not seen": (COPIED, {"a": None}, {}, dict.fromkeys("ab", "unseen")),
    "what has no elements": (chain(), {"c": Range()}, {}, dict.fromkeys("cd", "unseen")),
    "integers and constants": (GATHER, {"w": None}, {}, {}),
    "a hole that spares Casts": (
        HOLE,
        {"p": 1e5},
        {},
        {**dict.fromkeys("ps", "overflow"), "t": "overflow", "c": "no_gain"},
    ),
    "a hole that spares nothing": (NO_HOLE, {"p": 1e5}, {}, dict.fromkeys("ps", "overflow")),
    "what the user lowers": (chain(), {"c": 1e5}, {"lower": ["c"]}, {"d": "overflow"}),
    "a sum of a mean that fits": (mean(4096), {"m": 7.9}, {}, {}),
    "a sum of a mean that does not": (mean(4096), {"m": 8.1}, {}, {"m": "overflow"}),
}


@pytest.mark.parametrize("case", HELD)
def test_ranges_hold_these_ops_in_float32_by_these_rules(case: str) -> None:
    model, ranges, options, expected = HELD[case]
    assert kept_rules(model, seen(model, **ranges), **options) == expected


@pytest.mark.parametrize(
    ("model", "value", "found", "finding"),
    [
        (chain(), "c", 40_000.0, ("overflow", "reaches 40000; with headroom 2, beyond 65504; fits bfloat16")),
        (chain(), "c", 1e-4, ("underflow", "never exceeds 0.0001, which is less than 2 times 6.10352e-05")),
        (chain(), "a", INFINITE, ("nonfinite", "has 3 of 64 elements already infinite or NaN in float32")),
        (
            mean(4096),
            "m",
            8.1,
            ("overflow", "is a mean of 4096 terms, whose sum reaches 66355.2 with headroom, beyond 65504"),
        ),
    ],
)
def test_ops_kept_float32_by_ranges_are_a_finding(
    model: ModelProto, value: str, found: Range | float, finding: tuple[str, str]
) -> None:
    assert findings(model, seen(model, **{value: found})) == [(finding[0], value, finding[1])]


def test_bfloat16_represents_values_that_float16_cannot() -> None:
    assert kept_rules(chain(), seen(chain(), to="bfloat16", a=1e6), to="bfloat16") == {}
    assert kept_rules(mean(4096), seen(mean(4096), "bfloat16", m=8.1), to="bfloat16") == {}
    assert findings(chain(), seen(chain(), to="bfloat16", a=2e38), to="bfloat16") == [
        ("overflow", "a", "reaches 2e+38; with headroom 2, beyond 3.38953e+38")
    ]


def test_a_cluster_is_pinned_whole_even_without_safety_rules() -> None:
    graph = (
        "h=MatMul(x,w);m=ReduceMean[axes=-1](h);d=Sub(h,m);q=Mul(d,d);v=ReduceMean[axes=-1](q);e=Add(v,eps);"
        "r=Sqrt(e);n=Div(d,r);s=Mul(n,g);t=Add(s,g);y=MatMul(t,w)"
    )
    constants = {**WEIGHT, "eps": np.float32(1e-3), "g": np.ones(8, np.float32)}
    model = build(graph, ["y"], constants=constants, opset=13)
    for safety in ("default", "none"):
        found = kept_rules(model, seen(model, q=1e6), safety=safety, level="lower-all")
        assert {"m", "d", "q", "v", "e", "r", "n"} <= found.keys()
        assert "y" not in found


def test_an_op_of_a_half_model_is_raised() -> None:
    half = amp_rewrite.convert(chain(), target="onnx", io="low").model
    rows = converted(half, seen(half, c=1e5)).report.rows
    assert [(row.name, row.dtype) for row in rows if row.op != "Cast"] == [
        *(("a", "float16"), ("b", "float16"), ("c", "float32"), ("d", "float32"), ("y", "float16"))
    ]


def test_ranges_are_read_from_a_file_and_checked_against_the_type(tmp_path: Path) -> None:
    ranges = seen(chain(), c=1e5)
    ranges.save(tmp_path / "ranges.json")
    from_file = amp_rewrite.convert(chain(), target="onnx", shift="none", ranges=tmp_path / "ranges.json")
    assert from_file.report == converted(chain(), ranges).report
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain(), to="bfloat16"))
    assert str(error.value) == "the ranges are for bfloat16, not for float16; calibrate with to='float16'"


@pytest.mark.parametrize(("headroom", "message"), [(1.0, "1"), (0.0, "0"), (math.nan, "nan"), (math.inf, "inf")])
def test_a_headroom_below_1_is_refused(headroom: float, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain()), headroom=headroom)
    assert str(error.value) == f"a headroom of {message} is not a finite number above 1; use a number such as 2"
