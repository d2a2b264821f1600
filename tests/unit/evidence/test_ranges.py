"""Ranges: the file, the table and their model, and calibrating whole models as from dumped activations."""

import json
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

from amp_rewrite import DType, EvidenceError, Feed, Model, Ranges, View, calibrate, convert, emulate
from amp_rewrite.evidence.ranges import MAX_BYTES, Range, key
from amp_rewrite.files.casting import Fit
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.runtime.runner import Runner, SessionOptions
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
    untapped={"s": "it is not a tensor but seq(float32); tensors taken out of it are measured"},
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
  "s": "it is not a tensor but seq(float32); tensors taken out of it are measured"
 }
}
"""  # noqa: E501


# -- the file ------------------------------------------------------------------------------------------------


def test_the_file_is_one_value_a_line_comes_back_equal_and_fits_its_schema() -> None:
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


def test_a_saved_file_is_loaded_again_and_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    RANGES.save(path)
    assert Ranges.load(path) == RANGES
    with pytest.raises(EvidenceError) as refused:
        RANGES.save(path)
    assert str(refused.value) == f"{path} exists; name another output, or replace it with overwrite=True"
    os.link(path, tmp_path / "old.json")
    replace(RANGES, batches=3).save(path, overwrite=True)
    assert (Ranges.load(path).batches, Ranges.load(tmp_path / "old.json").batches) == (3, 2)  # replaced, not rewritten
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old.json", "r.json"]


@pytest.mark.parametrize(
    ("place", "fact"),
    [
        ("none/r.json", "cannot write {}: the folder {parent} does not exist; make it first"),
        (".", "cannot write {}: it is a folder; name a file"),
    ],
)
def test_places_that_cannot_be_written(tmp_path: Path, place: str, fact: str) -> None:
    path = tmp_path / place
    with pytest.raises(EvidenceError) as refused:
        RANGES.save(path)
    assert str(refused.value) == fact.format(path, parent=path.parent)


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "fact"),
    [
        (lambda d: d.pop("batches"), "the whole lacks the field 'batches'; calibrate again"),
        (lambda d: d.update(schema=2), "schema is 2, this version reads 1; calibrate again"),
        (lambda d: d.update(to="float32"), "to is 'float32', which is not a low type; calibrate again"),
        (lambda d: d.update(to="x" * 99), "to is 'xxxxxxxxxxxxxxxxxxx, which is not a low type; calibrate again"),
        (lambda d: d.update(batches=True), "batches must be an integer, but is true or false; calibrate again"),
        (lambda d: d["values"]["x"].pop("absmin"), "values.x lacks the field 'absmin'; calibrate again"),
        (lambda d: d["values"]["x"].update(count=1.5), "values.x.count must be an integer, but is a number;"
         " calibrate again"),
        (lambda d: d["values"]["x"].update(absmax=-1), "values.x.absmax must be a finite number that is not negative;"
         " calibrate again"),
        (lambda d: d["values"]["x"].update(absmax=10**400), "values.x.absmax must be a finite number that is not"
         " negative; calibrate again"),
        (lambda d: d["values"]["x"].update(overflow=11), "values.x counts more than its 10 elements; calibrate again"),
        (lambda d: d["values"]["x"].update(absmin=8e4), "values.x.absmin is larger than its absmax; calibrate again"),
        (lambda d: d["untapped"].update(s=1), "untapped.s must be text, but is an integer; calibrate again"),
        ("[]", "the whole must be an object, but is a list; calibrate again"),
        ("[" * 100_000, "nested too deeply, so not a file of ranges"),
        (TEXT.replace("70000.0", "NaN"), "not JSON (NaN is not a JSON number); calibrate again"),
        (TEXT.replace("70000.0", "1e999"), "values.x.absmax must be a finite number that is not negative;"
         " calibrate again"),
    ],
)  # fmt: skip
def test_a_file_that_was_tampered_with_is_refused_by_name(edit: Edit | str, fact: str) -> None:
    text = edit
    if callable(edit):
        edit(content := json.loads(TEXT))
        text = json.dumps(content)
    with pytest.raises(EvidenceError) as refused:
        Ranges.from_json(text, "r.json")
    assert str(refused.value) == f"r.json: {fact}"


def test_what_is_no_file_and_what_is_too_large_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    facts = []
    for path in (tmp_path / "none.json", tmp_path, large):
        with pytest.raises(EvidenceError) as refused:
            Ranges.load(path)
        facts.append(str(refused.value).replace(str(tmp_path), "T"))
    assert facts == [
        "cannot read T/none.json: No such file or directory; name a file that calibrate wrote",
        "cannot read T: it is not a regular file; name a file that calibrate wrote",
        "T/large.json: larger than 256 MiB, so not a file of ranges",
    ]


def test_the_table_shows_no_control_characters_of_a_file() -> None:
    text = replace(RANGES, model="\x1b[31m", origin="\x1b", values={"\x1b]0;x": X}, untapped={"\x1b": "\n"}).text()
    assert "\x1b" not in text


# -- of which model ------------------------------------------------------------------------------------------

NET = """<ir_version: 10, opset_import: ["" : 20]>
net (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }"""


def net(text: str = NET) -> Model:
    return Model.load(onnx.parser.parse_model(text))


def test_keys_name_bodies_by_their_path() -> None:
    view = View.of(Model.load(text_model("if_in_loop")))
    names = [key(view, value.id) for value in view.values]
    assert {name for name in names if ":" in name} >= {"loop/body:s", "loop/body/choice/then_branch:t"}


def test_ranges_are_those_of_one_model() -> None:
    found = fingerprint(net())
    ranges = replace(RANGES, graph=found.graph, weights=found.weights)
    ranges.check(net())
    others = [net(NET.replace("Mul", "Add")), net(NET.replace("{1, 2}", "{1, 3}"))]
    facts = []
    for other in others:
        with pytest.raises(EvidenceError) as refused:
            ranges.check(other)
        facts.append(str(refused.value))
    assert facts == [
        f"the ranges are of another model, net.onnx: graph {found.graph[:12]} and {fingerprint(others[0]).graph[:12]}"
        " differ; calibrate again on this one",
        f"the ranges are of another model, net.onnx: weights {found.weights[:12]} and"
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
    """The ranges of all floating tensors of the main graph, from their values themselves."""
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    given = {out.name for out in proto.graph.output}
    wanted = {v.name: t.dtype for v, t in zip(view.values, view.types, strict=True) if not v.scope and _float(t)}
    for name, dtype in wanted.items():
        if name not in given:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype.code, None))
    found = Runner.open(replace(view.model, proto=proto), SessionOptions(optimized=False)).run(batch, list(wanted))
    return {n: Range().merge(Fit.of([np.asarray(array).reshape(-1)], to)) for n, array in found.items()}


def _float(found: object) -> bool:
    return found is not None and found.container == "tensor" and found.dtype is not None and found.dtype.floating  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [f"tests/models/{name}.onnx" for name in KINDS])
def test_the_ranges_are_those_of_the_activations_themselves(name: str) -> None:
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


def test_a_conversion_finds_what_is_inside_of_the_standards_functions() -> None:
    """What the runtime computes as a function body is painted as one, and has ranges of its own."""
    batch = {"x": np.float32([[1, 2], [-3, 4]])}
    ranges = calibrate(onnx.parser.parse_model(FUNCTIONS), batch)
    for lists in ({}, {"deny": ["Elu"]}, {"deny": ["Mish"]}, {"deny": ["Selu", "Mish"]}):
        found = convert(onnx.parser.parse_model(FUNCTIONS), ranges=ranges, lists=lists)
        assert not [f for f in found.report.findings if f.kind == "unseen"], lists
        view = found.view
        measured = {view.value_name(v.id): ranges.of(view, v.id) for v in view.values}
        held = dumped(view, batch, DType.FLOAT16)
        inside = [name for name in held if "/" in name and view.constant(_value(view, name)) is None]
        assert {name: measured[name] for name in inside} == {name: held[name] for name in inside}
        assert bool(inside) == ("Mish" not in lists.get("deny", []))


def _value(view: View, name: str) -> int:
    return next(v.id for v in view.values if v.name == name)


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


def test_what_overflows_in_a_half_model_is_seen_with_its_true_size() -> None:
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
