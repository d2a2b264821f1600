"""Reports: contents, JSON, text, chains of reasons, and expectations."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, TypeProto
from onnx.helper import (
    make_map_type_proto,
    make_node,
    make_optional_type_proto,
    make_sequence_type_proto,
    make_sparse_tensor,
    make_sparse_tensor_type_proto,
    make_tensor,
    make_tensor_type_proto,
)

from amp_rewrite.decide.reasons import REASONS
from amp_rewrite.errors import Finding, PatternError, PolicyError, ReportError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.evidence import REPAIRED, Evidence
from amp_rewrite.reports.expect import Expectation
from amp_rewrite.reports.explain import explained
from amp_rewrite.reports.render import annotation, markdown_table, plain, share, size
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import attributes_of, report_of, spell_type
from amp_rewrite.reports.rows import FIRST_INPUT, NO_ROW, BakeRow, CastRow, Header, PortRow, Row, ShiftRow, Totals
from amp_rewrite.settings.request import RECORDED
from support.paths import ROOT, TESTS

GOLDEN = TESTS / "golden"
SCHEMA = json.loads((ROOT / "docs" / "reference" / "report.schema.json").read_text("utf-8"))

SCORER = """<ir_version: 8, opset_import: ["": 17]>
scorer (float[8, 16] x) => (float[8, 4] y, float[8, 1] z) <float[16, 16] w, float[16, 4] v> {
    [encoder] h = MatMul (x, w)
    [act] r = Relu (h)
    [head] y = MatMul (r, v)
    [exp] e = Exp (r)
    [axes] a = Constant <value = int64[1] {1}> ()
    [pool] z = ReduceSum (e, a)
}"""


def model(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """Parse a model, and fill its weights with numbers from -1 to 1."""
    proto = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        values = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return proto


def scorer(**options: Any) -> Converted:
    return convert(model(SCORER, w=(16, 16), v=(16, 4)), target="onnx", **options)


def inventory(proto: onnx.ModelProto, name: str | None = None) -> Report:
    return report_of(View.of(Model.load(proto)), name=name)


def golden() -> Report:
    return Report.from_json((GOLDEN / "report.json").read_bytes(), "report.json")


def test_a_conversions_row_has_a_rule_and_an_inventorys_row_a_type() -> None:
    report = inventory(model(SCORER, w=(16, 16), v=(16, 4)), name="/some/where/scorer.onnx")
    assert {row.dtype for row in report.rows} == {"float32", "int64"}
    assert (report.inventory, report.model.name, report.rows[0].rule) == (True, "scorer.onnx", None)
    assert (report.totals.compute_ops, report.totals.compute_lowered) == (2, 0)
    act = scorer().report.rows[1]
    assert (act.rule, act.because, act.because_row, act.color) == ("between_allow", "head", 2, "clear")
    assert act.why == "between_allow because of head"
    assert act.source.startswith("float16.yaml:")


def test_a_weight_with_a_float32_copy_takes_more_space_than_before() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[2, 8] x) => (float[2, 2] y, float[8, 2] z) <float[8, 2] w> {
        y = MatMul (x, w)
        z = Exp (w)
    }"""
    totals = convert(model(text, w=(8, 2)), target="onnx").report.totals
    assert (totals.weights_before, totals.weights_after) == (64, 64 + 32)


def test_every_cast_of_a_model_with_bodies_is_counted_with_its_readers() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[8, 8] h, float[8, 8] x, bool c) => (float[8, 8] y, float[8, 8] wide, float[8, 8] e) <float[8, 8] w> {
        [widen] wide = Cast <to = 1> (h)
        [product] p = MatMul (wide, w)
        [sum] s = Add (p, x)
        [narrow] n = Cast <to = 10> (s)
        [again] a = Cast <to = 1> (n)
        [curve] e = Exp (a)
        [pick] y = If (c) <
            then_branch = t () => (float[8, 8] k) { [up] k = Cast <to = 1> (n) },
            else_branch = f () => (float[8, 8] l) { [low] r = Cast <to = 10> (x) [back] l = Cast <to = 1> (r) }
        >
    }"""
    report = convert(model(text, w=(8, 8)), target="onnx", keep=["sum"]).report
    existing = [
        ("h", "float16", "float32", "existing", "the op 'widen'", "", 2, 256, FIRST_INPUT, 0),
        ("s", "float32", "float16", "existing", "the op 'narrow'", "", 2, 128, 2, 0),
        ("n", "float16", "float32", "existing", "the op 'again'", "", 1, 256, 2, 0),
        ("n", "float16", "float32", "existing", "the op 'up'", "", 1, 256, 2, 0),
        ("x", "float32", "float16", "existing", "the op 'low'", "", 1, 128, FIRST_INPUT - 1, 0),
        ("r", "float16", "float32", "existing", "the op 'back'", "pick/else_branch/", 1, 256, FIRST_INPUT - 1, 0),
    ]
    inserted = ("p", "float16", "float32", "inserted", "read in float32 by 'sum'", "", 1, 256, 1, 0)
    assert [tuple(cast) for cast in report.casts] == [*existing, inserted]
    h, x, c = FIRST_INPUT, FIRST_INPUT - 1, FIRST_INPUT - 2
    reads = [(h,), (h,), (1, x), (2,), (2,), (2,), (2,), (x,), (x,), (c, 2, x)]
    assert [row.reads for row in report.rows] == reads
    counted = Totals(ops=10, float_ops=10, compute_ops=1, compute_lowered=1, casts_to_float32=1, casts_existing=6)
    work = {"baked": 1, "weights_before": 256, "weights_after": 128, "flops": 2 * 8**3, "flops_low": 2 * 8**3}
    assert report.totals == replace(counted, **work)


def test_ops_in_bodies_have_a_path_and_their_owner_reads_the_bodys_outputs() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (bool c, float[4] x) => (float[4] y) {
        [pick] y = If (c) <
            then_branch = t () => (float[4] a) { [up] a = Exp (x) },
            else_branch = e () => (float[4] b) { b = Relu (x) }
        >
    }"""
    report = inventory(model(text))
    paths = [row.path for row in report.rows]
    assert (paths, report.rows[2].reads) == (
        ["pick/then_branch/up", "pick/else_branch/Relu_0", "pick"],
        (FIRST_INPUT, 0, 1),
    )
    assert [row.named for row in report.rows] == [True, False, True]


ATTRIBUTED = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "ai.onnx.ml" : 3, "own" : 1]>'
FLOAT, INT8 = make_tensor_type_proto(1, None), make_tensor_type_proto(3, None)


@pytest.mark.parametrize(
    ("node", "counted"),
    [
        ("y = Softmax <axis = 0> (x)", {}),
        ("y = Cast <to = 10> (x)", {}),
        ("y = Cast <to = 10, saturate = 0> (x)", {"saturate": "0"}),
        ("y = Constant <value_float = 1.0> ()", {}),
        ("s = Shape (x) y = ConstantOfShape <value = float {0}> (s)", {}),
        ("y = LayerNormalization <epsilon = 0.00001, stash_type = 1> (x, x)", {}),
        (
            "y = LayerNormalization <epsilon = 0.001, stash_type = 10> (x, x)",
            {"epsilon": "0.001", "stash_type": "float16"},
        ),
        ('y = Gelu <approximate = "none"> (x)', {}),
        ('y = Gelu <approximate = "tanh"> (x)', {"approximate": "tanh"}),
        ("y = own.F <a = 1, b = 0.5, axis = 3> (x)", {"a": "1", "b": "0.5", "axis": "3"}),
        ('y = own.F <a = [1, 2], b = [0.5], c = ["u", "v"]> (x)', {"a": "1, 2", "b": "0.5", "c": "u, v"}),
        ("y = own.F <a = float16 {1}, stash_type = 10> (x)", {"a": "float16", "stash_type": "float16"}),
        ("y = own.F <a = [1, 2, 3, 4, 5, 6, 7, 8]> (x)", {"a": "1, 2, 3, 4, 5, 6, 7, 8"}),
        (
            "y = own.F <a = [1, 2, 3, 4, 5, 6, 7, 8, 9]> (x)",
            {"a": f"9 items {crc32(chr(0).join('123456789').encode()):08x}"},
        ),
        ("y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x)", {"offset": "a list", "scale": "a list"}),
    ],
)
def test_attributes_count_except_positions_types_and_defaults(node: str, counted: dict[str, str]) -> None:
    op = View.of(Model.load(onnx.parser.parse_model(f"{ATTRIBUTED} g (float[2,4] x) => (y) {{ {node} }}"))).ops[-1]
    assert attributes_of(op.domain, op.signature, op.node.attribute) == counted


@pytest.mark.parametrize(
    ("proto", "spelling"),
    [
        (FLOAT, "float32"),
        (make_tensor_type_proto(99, None), "type 99"),
        (make_sparse_tensor_type_proto(TensorProto.FLOAT16, None), "sparse_tensor(float16)"),
        (make_map_type_proto(TensorProto.INT64, FLOAT), "map(int64, float32)"),
        (make_sequence_type_proto(make_map_type_proto(TensorProto.STRING, INT8)), "seq(map(string, int8))"),
        (make_optional_type_proto(INT8), "optional(int8)"),
        (TypeProto(), "unknown"),
    ],
)
def test_types_are_spelled_in_full(proto: TypeProto, spelling: str) -> None:
    assert spell_type(proto) == spelling
    node = make_node("F", [], [], domain="own", a=proto)
    assert attributes_of("own", None, node.attribute) == {"a": spelling}


def test_sparse_tensors_and_graphs_in_attributes_count() -> None:
    sparse = make_sparse_tensor(make_tensor("v", 1, [1], [2.0]), make_tensor("i", 7, [1], [0]), [3])
    node = make_node(
        "F",
        [],
        [],
        domain="own",
        a=sparse,
        b=onnx.parser.parse_model(f"{ATTRIBUTED} g (float x) => (y) {{ y = Neg (x) }}").graph,
    )
    assert attributes_of("own", None, node.attribute) == {"a": "sparse_tensor"}


def test_json_round_trips_equal_and_byte_for_byte() -> None:
    text = (GOLDEN / "report.json").read_text("utf-8")
    report = Report.from_json(text, "report.json")
    assert (report.to_json(), Report.from_json(report.to_json(), "again")) == (text, report)
    for again in (scorer().report, inventory(model(SCORER, w=(16, 16), v=(16, 4)))):
        assert Report.from_json(again.to_json(), "again") == again


def test_every_field_survives_json() -> None:
    row = Row(
        "a\n\x1b\u00e9",
        "x::Op",
        "bfloat16",
        "s/",
        False,
        {"U": "float32", "T": "bfloat16"},
        *("gray", "keep", "b", 0, "n", "l:1", "r", ("", "int64"), ("seq(float32)",), (NO_ROW, -1)),
        *({"bits": "4"}, "0a1b2c3d"),
    )
    header = Header("m", 10, {"": 1}, "1", "bfloat16", {"level": "l", "target": "t", "safety": "s"}, "li", "fp")
    report = Report(
        header,
        Totals(*range(19)),
        (row, row),
        (CastRow("v", "float32", "bfloat16", "folded", "r", "s/", 2, 3, 0, 1),),
        (BakeRow("w", "bfloat16", 4, 2, "s/", True),),
        (Finding("k", "s", "m"),),
        (PortRow("x", "seq(map(int64, float32))"),),
        (PortRow("y", "float32", FIRST_INPUT, 1),),
        {"float16": 3},
        Evidence(REPAIRED, "x.npz", 3, True, "error ≤ 0.01", "0.5", True, 2, "why", 0.5),
        (ShiftRow("v", 3, 2, 7e4, 0.5, 4.0, ("w",), ("y",), "why"),),
    )
    read = Report.from_json(report.to_json(), "all")
    assert read == report
    assert '"variables": {"T": "bfloat16", "U": "float32"}' in report.to_json()


def changed(**changes: object) -> str:
    loaded = json.loads((GOLDEN / "report.json").read_text("utf-8"))
    return json.dumps({**loaded, **changes})


ROW = {"name": "a", "op": "Relu", "dtype": "float16"}
MALFORMED: Mapping[str, tuple[str | bytes, str]] = {
    "truncated": ((GOLDEN / "report.json").read_text("utf-8")[:500], "not JSON"),
    "binary": (b"\xff\x00\x01", "not UTF-8, so it is not"),
    "a list": ("[]", "the document must be an object, but is a list"),
    "deep": ("[" * 200_000, "nested too deeply"),
    "too many digits": ('{"schema": ' + "1" * 5000 + "}", "not JSON"),
    "no schema": ("{}", "schema is None, but this version reads 1; write the report again"),
    "newer, and unknown rows before it": (
        changed(rows=[{"shape": []}], schema=3),
        "schema is 3, but this version reads 1 (upgrade amp-rewrite)",
    ),
    "schema of another type": (changed(schema=True), "schema must be an integer, but is true or false"),
    "NaN": ('{"schema": 1, "totals": {"ops": NaN}}', "NaN is not a JSON number"),
    "infinite": (changed(totals={"ops": float("1e308")}).replace("1e+308", "1e999"), "totals.ops must be an integer"),
    "missing field": (changed(rows=[{"name": "a", "op": "Relu"}]), "rows[0] is missing the field 'dtype'"),
    "text for a list": (changed(rows="all"), "rows must be a list, but is text"),
    "number for text": (changed(rows=[ROW, {**ROW, "rule": 3}]), "rows[1].rule must be text, but is an integer"),
    "inside a map": (changed(rows=[{**ROW, "variables": {"T": None}}]), "rows[0].variables.T must be text"),
    "trailing text": (changed() + "{}", "not JSON (Extra data"),
    "reads itself": (changed(rows=[{**ROW, "reads": [0]}]), "rows[0].reads does not name"),
    "reads no input": (changed(rows=[{**ROW, "reads": [-3]}]), "rows[0].reads does not name"),
    "because of nothing": (changed(rows=[{**ROW, "because_row": 1}], casts=[]), "rows[0].because_row does not name"),
    "output of nothing": (changed(outputs=[{"name": "y", "dtype": "float32", "after": 99}]), "outputs[0].after"),
    "cast of nothing": (changed(rows=[ROW]), "casts[1].after does not name"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_report_is_refused_by_field(case: str) -> None:
    text, fact = MALFORMED[case]
    with pytest.raises(ReportError) as caught:
        Report.from_json(text, "a.json")
    assert str(caught.value).startswith("a.json: ")
    assert fact in str(caught.value)


def test_an_oversized_report_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.reports.report.MAX_CHARACTERS", 10)
    with pytest.raises(ReportError, match="larger than"):
        Report.from_json("[0, 0, 0, 0]", "a.json")


def test_the_json_schema_names_and_describes_the_fields_of_reports() -> None:
    classes = {"model": Header, "totals": Totals, "row": Row, "cast": CastRow, "bake": BakeRow, "finding": Finding}
    classes |= {"port": PortRow, "shift": ShiftRow}
    for name, cls in classes.items():
        properties = SCHEMA["$defs"][name]["properties"]
        own = {field.rstrip("_") for field in cls.__annotations__}
        assert set(properties) == (own - {"settings"} | set(RECORDED) if cls is Header else own), name
    assert set(SCHEMA["properties"]) == {field.name for field in fields(Report)}
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for report in (golden(), scorer().report, inventory(model(SCORER, w=(16, 16), v=(16, 4)))):
        validator.validate(json.loads(report.to_json()))
    assert not validator.is_valid(json.loads(changed(extra=1)))


def test_reading_and_comparing_reports_imports_neither_onnx_nor_numpy() -> None:
    code = """
import sys
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.explain import explained
from amp_rewrite.reports.report import Report
report = Report.from_json(open(sys.argv[1], "rb").read(), "report")
report.text(verbose=True), str(explained(report, ["act"])), diff(report, report).to("github")
print(sorted({"onnx", "numpy", "yaml", "networkx", "click", "rich"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(GOLDEN / "report.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("file", "verbose"), [("report.txt", False), ("report.verbose.txt", True)])
def test_the_text_of_a_report(file: str, verbose: bool) -> None:
    assert golden().text(verbose=verbose) == (GOLDEN / file).read_text("utf-8")


def test_a_summary_fits_one_screen_with_one_finding_of_each_kind() -> None:
    many = [Finding("saturated", f"w{i}", "too large") for i in range(300)]
    many += [Finding("fused", "a", "two ops"), Finding("saturated", "m", "beyond · harmless: it only selects")]
    report = replace(golden(), findings=tuple(many))
    assert "  findings  302, 300 need action (-v shows all)\n" in report.text()
    assert report.text().count("saturated") == 1 and "fused" not in report.text()
    assert "  saturated: w0: too large (and 299 more) · " in report.text()
    assert report.text(verbose=True).count("saturated") == 301
    rules = [rule for rule in REASONS if rule != "raised"]
    rows = [Row(f"/a long name/{i}", f"Op{i % 9}", "float32", rule=rule) for i, rule in enumerate(rules)]
    casts = [CastRow(f"v{i}", "float16", "float32", reason="read in float32 by 'n'", after=i) for i in range(30)]
    casts += [CastRow(f"w{i}", "float32", "float16", reason="read in float16 by 'n'", after=i) for i in range(30)]
    report = replace(golden(), rows=tuple(rows), casts=tuple(casts), findings=(Finding("saturated", "w", "x " * 60),))
    lines = report.text().splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    assert any("-v shows all" in line for line in lines)


def test_names_cannot_break_out_of_a_cell_annotation_or_terminal() -> None:
    evil = replace(golden(), rows=tuple(row._replace(name="\x1b[2J" + row.name) for row in golden().rows))
    assert "\x1b" not in evil.text(verbose=True) + str(explained(evil, ["#0"]))
    assert markdown_table(("a",), [("x|`y`",)])[2] == "| `` x\\|`y` `` |"
    line = annotation("error", "50%\r\na:b,c", {"title": "x:y,z%\n"})
    assert line == "::error title=x%3Ay%2Cz%25%0A::50%25%0D%0Aa:b,c"
    hostile = annotation("error", "##vso[task.x]", {"title": "##[group]"})
    assert hostile == "::error title=\\u0023#[group]::\\u0023#vso[task.x]"


def test_texts_are_plain_sizes_have_units_and_only_a_whole_share_is_100_percent() -> None:
    texts = {"a b": "a b", "a\nb": "a\\nb", "\x1b[1m": "\\x1b[1m", "\u202e": "\\u202e", "é": "é"}
    assert [plain(text) for text in texts] == [*texts.values()]
    assert [size(n) for n in (0, 999, 1000, 999_949, 999_950, 2 * 10**9, 3 * 10**12)] == [
        *("0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "2.0 GB", "3.0 TB")
    ]
    assert [share(*of) for of in ((0, 0), (0, 9), (1, 999), (998, 999), (9, 9))] == ["-", "0%", "1%", "99%", "100%"]


def test_explain_follows_reasons_to_the_root_even_in_a_circle() -> None:
    assert str(explained(golden(), ["shift"])) == (GOLDEN / "explain.txt").read_text("utf-8")
    rows = (
        Row("a", "Mul", "float32", rule="cluster", because="b", because_row=1),
        Row("b", "Add", "float32", rule="cluster", because="a", because_row=0),
    )
    looped = replace(golden(), rows=rows, casts=())
    assert str(explained(looped, ["a"])).count("because b (Add)") == 1


def test_explain_states_the_types_of_an_inventory_and_of_each_type_variable() -> None:
    view = View.of(Model(model(SCORER, w=(16, 16), v=(16, 4))))
    plain_model = report_of(view)
    undecided = "encoder (MatMul) is float32 in the model; its new type is not decided yet\n"
    assert str(explained(plain_model, ["encoder"])) == undecided
    assert str(explained(plain_model, ["h"], view)) == undecided
    with pytest.raises(PatternError, match="'w' is a weight; explain an op that reads it"):
        explained(plain_model, ["w"], view)
    mixed = Row("n", "LayerNormalization", "float16", rule="in_list", variables={"T": "float16", "U": "float32"})
    alike = Row("m", "Relu", "int64", variables={"T": "int64"})
    report = replace(golden(), rows=(mixed, alike), casts=())
    assert str(explained(report, ["n"])).startswith(
        "n (LayerNormalization) is float16 (T float16, U float32): in_list\n"
    )
    assert str(explained(report, ["#1"])) == "m (Relu) is int64: it does not compute in float32\n"


def test_explain_lists_the_ops_of_an_ambiguous_name() -> None:
    rows = (Row("a", "Relu", "float32", "one/"), Row("a", "Exp", "float32", "two/"))
    report = replace(golden(), rows=rows, casts=())
    with pytest.raises(PatternError, match=r"2 ops are named 'a'; explain #0 .one/a. or #1 .two/a."):
        str(explained(report, ["a"]))
    assert str(explained(report, ["two/a"])).startswith("two/a (Exp)")
    assert str(explained(report, ["#0"])).startswith("one/a (Relu)")


def test_a_page_has_every_rule_in_the_wording_of_explain() -> None:
    pages = {reason: (ROOT / reason.docs.partition("#")[0]).read_text("utf-8") for reason in REASONS.values()}
    assert [reason.name for reason, page in pages.items() if reason.words not in page] == []


def test_findings_name_the_ops_kept_float32_by_opset_and_kernels() -> None:
    def found(text: str, **options: Any) -> set[tuple[str, str]]:
        report = convert(model(f'<ir_version: 8, opset_import: ["": 21, "my": 1]> g {text}'), **options).report
        return {(f.kind, f.subject) for f in report.findings}

    conv = "(float[1, 1, 4, 4] x, float[1, 1, 2, 2] w) => (float[1, 1, 3, 3] y) { y = Conv (x, w) }"
    assert ("schema_gate", "Conv") in found(conv, to="bfloat16", target="onnx")
    assert ("schema_gate", "Conv") not in found(conv, target="onnx")
    hardmax = "(float[16, 16] x) => (float[16, 16] y) { a = MatMul (x, x) h = Hardmax (a) y = MatMul (h, h) }"
    assert ("kernel_gate", "Hardmax") in found(hardmax, target="ort-cuda")
    assert ("kernel_gate", "Hardmax") not in found(hardmax, target="onnx")


def test_float16_ops_of_the_source_are_reported_and_are_not_left_float32() -> None:
    half = model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[8, 8] x) => (float[8, 8] y)'
        " { a = MatMul (x, x)  y = Cast <to = 1> (a) }"
    )
    report = convert(half).report
    assert "stays float32" not in report.text() and "stay float32" not in report.text()
    assert "(MatMul) is float16 in the model already\n" in str(explained(report, ["#0"]))


def report() -> Report:
    rows = (
        Row("a", "MatMul", "float16", variables={"T": "float16"}, reads=(-2,)),
        Row("b", "MatMul", "float16", variables={"T": "float16"}, reads=(0,)),
        Row("head", "Softmax", "float32", variables={"T": "float32"}, reads=(1,)),
        Row("shape", "Shape", "int64", inputs=("float32",), outputs=("int64",), reads=(2,)),
        Row("unread", "Exp", "float32", variables={"T": "float32"}, reads=(1,)),
        Row("copy", "Identity", "float32", variables={"T": "float32"}, reads=(2,)),
        Row("w", "Constant", "float32"),
    )
    casts = (
        CastRow("x", "float32", "float16", readers=1, after=-2),
        CastRow("b", "float16", "float32", readers=1, after=1),
        CastRow("folded", "float16", "float32", origin="folded", readers=1),
        CastRow("unread", "float16", "float32"),
        CastRow("own", "float32", "float32", readers=1),
    )
    weights = {"float16": 3000, "float32": 900, "int64": 100}
    inputs = PortRow("x", "float32"), PortRow("ids", "int64")
    outputs = PortRow("y", "float32", 2), PortRow("n", "int64", 3)
    header = Header("m.onnx", 10, {"ai.onnx": 21})
    return Report(header, Totals(), rows, casts, inputs=inputs, outputs=outputs, weights=weights)


@pytest.mark.parametrize(
    ("text", "met", "fact"),
    [
        ("float16 >= 95%", False, "66.67% (2 of 3 float ops)"),
        ("float16=2", True, "2 of 3 float ops"),
        ("int64 = 1", True, "1 of 4 ops"),
        ("float32 < 1", False, "1 of 3 float ops"),
        ("compute >= 100%", True, "100% (2 of 2 compute ops)"),
        ("casts <= 2", True, "2 casts"),
        ("ops <= 3", False, "4 ops"),
        ("ops > 3", True, "4 ops"),
        ("ops != 3", True, "4 ops"),
        ("ops[MatMul] >= 2", True, "2 of 4 ops"),
        ("ops[*] = float16", False, "2 of 4: head is float32, shape is int64"),
        ("ops[head] != float16", True, "1 of 1"),
        ("ops[Gelu] = float32", False, "no op matches 'Gelu'"),
        ("ops[Gelu] = 0", True, "0 of 4 ops"),
        ("io = float32", True, "2 of 2"),
        ("io = float16", False, "0 of 2: x is float32, y is float32"),
        ("inputs[ids] = int64", True, "1 of 1"),
        ("outputs = float32", True, "1 of 1"),
        ("weights < 3999", False, "4.0 kB"),
        ("weights = float16", False, "3.0 kB float16, 900 B float32"),
        ("weights != bfloat16", True, "3.0 kB float16, 900 B float32"),
        ("weights[float32] <= 22.5%", True, "22.5% (3.0 kB float16, 900 B float32, 100 B int64)"),
        ("weights[float32] <= 1 kB", True, "900 B"),
    ],
)
def test_an_expectation_passes_or_fails_and_shows_the_numbers(text: str, met: bool, fact: str) -> None:
    outcome = Expectation.parse(text).outcome(report())
    assert (outcome.met, outcome.fact) == (met, fact)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("float16", "is not a comparison; write it like 'compute >= 95%'"),
        ("flot16 >= 3", "unknown 'flot16'; did you mean 'float16'"),
        ("casts[x] <= 3", "casts takes no brackets"),
        ("weights[half] <= 3", "unknown type 'half'"),
        ("ops[x] < float16", "ops cannot be compared with < 'float16'; write it like"),
        ("io >= 3", "io cannot be compared with >= '3'"),
        ("float16 >= many", "float16 cannot be compared with >= 'many'"),
        ("float16 >= 3 MB", "float16 cannot be compared with >= '3 MB'"),
        ("casts <= 4%", "casts cannot be compared with <= '4%'"),
    ],
)
def test_a_malformed_expectation_is_refused_with_a_remedy(text: str, fact: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Expectation.parse(text)
    assert f"expectation {text!r}" in str(caught.value)
    assert fact in str(caught.value)


def test_a_share_of_nothing_fails() -> None:
    empty = replace(report(), rows=(), casts=(), weights={}, inputs=(), outputs=())
    for text in ("float16 >= 0%", "weights[float32] <= 1%", "weights = float16"):
        assert not Expectation.parse(text).outcome(empty).met
