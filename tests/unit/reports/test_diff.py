"""Diffs of reports: kinds of differences, matching of ops, and the four formats."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.delta import KINDS, Delta
from amp_rewrite.reports.diff import diff, match
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.reports.rows import FIRST_INPUT, CastChange, CastRow, Change, Header, PortRow, Row, Totals
from support import corpus
from support.paths import TESTS

GOLDEN = TESTS / "golden"
HEAD = '<ir_version: 8, opset_import: ["": 18]>'
FIXTURES = [TESTS / "models" / f"{name}.onnx" for name in corpus.KINDS]


def report(*rows: Row, casts: Iterable[CastRow] = (), name: str = "m", **header: Any) -> Report:
    return Report(Header(name, 9, {"ai.onnx": 17}, **header), Totals(), rows, tuple(casts))


def chain(*ops: str, dtype: str = "float32", prefix: str = "", named: bool = True) -> Report:
    """Return ops in a chain; "MatMul:first" is an op with a name, "MatMul" one with a numbered name."""
    rows = []
    for i, op in enumerate(ops):
        kind, _, name = op.partition(":")
        reads = (i - 1,) if i else ()
        rows.append(Row(name or f"{prefix}{kind}_{i}", kind, dtype, named=named, reads=reads, inputs=(dtype,)))
    return report(*rows)


def inventory(model: onnx.ModelProto) -> Report:
    return report_of(View.of(Model.load(model)))


def only(delta: Delta, **counts: int) -> None:
    assert dict(delta.counts) == {**dict.fromkeys(KINDS, 0), **counts}


# -- kinds of difference -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("float32", "float16", "lowered"),
        ("float64", "bfloat16", "lowered"),
        ("bfloat16", "float32", "raised"),
        ("float16", "bfloat16", "retyped"),
        ("float64", "float32", "retyped"),
        ("int64", "int32", "retyped"),
        ("float16", "unknown", "retyped"),
    ],
)
def test_each_change_of_type_has_its_kind(before: str, after: str, kind: str) -> None:
    delta = diff(chain("Relu", dtype=before), chain("Relu", dtype=after))
    assert delta.changes == (Change(kind, "Relu_0", "Relu", before=before, after=after),)


def test_a_change_of_one_type_variable_is_found_even_if_the_ops_type_stays() -> None:
    def norm(scale: str) -> Report:
        return report(Row("n", "LayerNormalization", "float16", variables={"T": "float16", "U": scale}))

    (change,) = diff(norm("float32"), norm("float16")).changes
    assert (change.kind, change.variable, change.types) == ("lowered", "U", "float32 → float16")


def test_casts_are_counted_by_the_value_and_not_as_ops() -> None:
    ops = chain("MatMul", "Exp").rows
    old, new = (CastRow(name, "float16", "float32", after=0, readers=1) for name in "ab")
    one, folded = report(*ops, casts=[old]), report(*ops, casts=[old._replace(origin="folded")])
    two = report(*ops, casts=[CastRow("x", "float32", "float16", readers=1), old])
    only(diff(one, report(*ops, casts=[new._replace(origin="existing")])))
    assert diff(one, two).casts == (CastChange("+", "x", "float32", "float16"),)
    assert diff(one, folded).casts == (CastChange("-", "a", "float16", "float32"),)
    assert diff(two, folded).summary() == "casts -2"
    cast = Row("c", "Cast", "float16", inputs=("float32",), outputs=("float16",))
    mask = Row("m", "Cast", "float32", inputs=("bool",), outputs=("float32",))
    only(diff(report(), report(cast, Row("k", "Constant", "float16"))))
    only(diff(report(), report(mask)), added=1)


def test_changed_settings_are_reported_but_are_not_a_difference() -> None:
    usual = {"level": "default", "safety": "default"}
    a = report(to="float16", settings={"target": "onnx", **usual})
    b = report(Row("r", "Relu", "float32"), to="float16", settings={"target": "ort-cuda", **usual})
    assert diff(a, b).settings == (("target", "onnx", "ort-cuda"),)
    assert "target:  onnx → ort-cuda" in diff(a, b).text()
    assert not diff(a, report(to="float16", settings={"target": "ort-cuda", **usual})).differs


# -- matching of ops ---------------------------------------------------------------------------------


def test_renamed_ops_are_recognized_by_position_even_in_a_long_chain() -> None:
    only(diff(chain("MatMul", "Relu", "MatMul", "Exp"), chain("MatMul", "Relu", "MatMul", "Exp", prefix="x")))
    kinds = ["MatMul", "Add", "Relu", "Softmax", "Mul"] * 350
    new = [kind for i, kind in enumerate(kinds) if i % 997]
    only(diff(chain(*kinds), chain(*new, prefix="x")), removed=len(kinds) - len(new))


@pytest.mark.parametrize("named", [True, False])
def test_numbered_names_shifted_by_inserted_ops_do_not_mislead(named: bool) -> None:
    old = ["MatMul", "Relu"] * 20
    new = [*old[:12], "Tanh", "Tanh", *old[12:]]
    delta = diff(chain(*old, named=named), chain(*new, named=named))
    assert [(c.kind, c.name) for c in delta.changes] == [("added", "Tanh_12"), ("added", "Tanh_13")]


def test_names_distinguish_branches_of_the_same_shape() -> None:
    def branches(**dtypes: str) -> Report:
        stem = Row("stem", "MatMul", "float16")
        heads = (Row(name, "MatMul", dtype, reads=(0,)) for name, dtype in dtypes.items())
        return report(stem, *heads)

    old = branches(query="float16", key="float16", value="float16")
    new = branches(value="float32", query="float16")
    assert [(c.kind, c.name) for c in diff(old, new).changes] == [("raised", "value"), ("removed", "key")]


@pytest.mark.parametrize(
    ("twin_reads", "added"),
    [((), ["t", "twin"]), ((0,), ["a", "t"])],
    ids=["name and upstream outweigh downstream", "upstream and downstream outweigh name"],
)
def test_two_kinds_of_evidence_outweigh_the_third(twin_reads: tuple[int, ...], added: list[str]) -> None:
    stem, relu = Row("stem", "Conv", "float16"), Row("a", "Relu", "float16", reads=(0,))
    a = report(stem, relu, Row("e", "Exp", "float32", reads=(1,)))
    tanh, twin = Row("t", "Tanh", "float16", reads=(1,)), Row("twin", "Relu", "float16", reads=twin_reads)
    b = report(stem, relu, tanh, twin, Row("e", "Exp", "float32", reads=(3,)))
    assert [(c.kind, c.name) for c in diff(a, b).changes] == [("added", name) for name in added]


def test_operands_are_matched_by_position_and_ops_after_others_by_name() -> None:
    def difference(*dtypes: str, reads: tuple[int, int]) -> Report:
        sources = (Row(f"Relu_{i}", "Relu", dtype, named=False) for i, dtype in enumerate(dtypes))
        return report(*sources, Row("Sub_2", "Sub", "float16", named=False, reads=reads))

    only(diff(difference("float16", "float32", reads=(0, 1)), difference("float32", "float16", reads=(1, 0))))

    def sums(kind: str, *names: str) -> Report:
        ends = (Row(f"{kind}_{at}", kind, "float32", named=False) for at in range(2))
        moved = (Row(name, "Relu", "float32", reads=(at,)) for at, name in enumerate(names))
        return report(*ends, *moved, Row("sum", "Add", "float32", reads=(2, 3), named=False))

    assert set(match(sums("Exp", "p", "q"), sums("Tanh", "q", "p"))) == {(2, 3), (3, 2), (4, 4)}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_report_and_the_inventory_of_its_result_do_not_differ(path: Path) -> None:
    converted = convert(path)
    delta = diff(converted.report, inventory(converted.model))
    views = 2 * len(converted.plan.parted)  # Reshapes around a Transpose; the report has a finding for them
    assert {kind: number for kind, number in delta.counts.items() if number} == ({"added": views} if views else {})
    assert views or delta.text() == "no difference\n"
    assert diff(inventory(onnx.load(path)), converted.report).counts["raised"] == 0


# -- formats and checks ------------------------------------------------------------------------------


def kept() -> Delta:
    a, b = (Report.from_json((GOLDEN / name).read_bytes(), name) for name in ("report.json", "report.kept.json"))
    return diff(a, b)


@pytest.mark.parametrize(
    ("form", "file"),
    [("text", "diff.summary.txt"), ("json", "diff.json"), ("markdown", "diff.md"), ("github", "diff.github")],
)
def test_the_formats_of_a_diff(form: str, file: str) -> None:
    assert kept().to(form, ["raised"]) == (GOLDEN / file).read_text("utf-8")
    assert kept().text(verbose=True) == (GOLDEN / "diff.txt").read_text("utf-8")


def test_only_the_named_kinds_fail_and_float32_means_raised_or_added() -> None:
    assert (kept().fails(), kept().fails(["raised"]), kept().fails(["casts", "added"])) == (True, True, True)
    assert (kept().fails(["lowered"]), kept().fails(["added", "removed", "retyped"])) == (False, False)
    with pytest.raises(PolicyError, match="unknown kind of difference 'rised'; did you mean 'raised'"):
        kept().fails(["rised"])
    raised, low = Change("raised", "n", "Relu"), Change("added", "m", "Relu", after="float16")
    added = replace(low, after="float32")
    fails = [Delta("a", "b", (change,)).fails(["float32"]) for change in (raised, low, added)]
    assert fails == [True, False, True]
    marks = Delta("a", "b", (low, added)).github(["float32"]).splitlines()
    assert [line.partition(" ")[0] for line in marks] == ["::error", "::warning"]


def test_annotations_are_errors_if_the_check_fails_and_at_most_ten_of_each() -> None:
    many = Delta("a", "b", tuple(Change("raised", f"n{i}", "Relu") for i in range(30)))
    assert many.github().count("::warning") == 10
    assert many.github(["raised"]).splitlines()[-1] == "::error::and 21 more"
    assert many.github(["added"]).count("::error") == 0
    assert many.github(()).count("::error") == 10
    assert Delta("a", "b").github() == "::notice::no difference\n"


def test_a_comment_with_long_names_fits_and_counts_the_omitted() -> None:
    name = "näme|`" * 50_000
    many = Delta(
        "a", "b", tuple(Change("raised", f"{i}{name}", "Relu", before="float16", after="float32") for i in range(500))
    )
    text = many.markdown()
    assert len(text.encode()) < 65536
    rows = [line for line in text.splitlines() if line.startswith("| `raised` |")]
    assert len(rows) > 20 and f"… and {500 - len(rows)} more." in text


def test_the_documentation_shows_the_printed_text() -> None:
    page = (GOLDEN.parents[1] / "docs" / "reference" / "report.md").read_text("utf-8")
    for name in ("report.txt", "explain.txt", "diff.txt", "diff.summary.txt"):
        assert f"```\n{(GOLDEN / name).read_text('utf-8')}```\n" in page


# -- ports, attributes, copies ---------------------------------------------------------------------------


def test_types_of_each_input_and_output_are_compared() -> None:
    def op(*inputs: str, outputs: Sequence[str] = ("float32",), kind: str = "x::Op") -> Report:
        return report(Row("n", kind, "float32", inputs=inputs, outputs=tuple(outputs)))

    one = op("float32", "int8")
    assert diff(one, op("float32", "int8")).changes == ()
    (change,) = diff(one, op("float32", "int4")).changes
    assert (change.kind, change.variable, change.types) == ("retyped", "input 1", "int8 → int4")
    (change,) = diff(one, op("float32", "int8", outputs=("float16",))).changes
    assert (change.kind, change.variable) == ("lowered", "output 0")
    (change,) = diff(one, op("float32", "int8", "float32")).changes
    assert (change.variable, change.types) == ("inputs", "float32, int8 → float32, int8, float32")
    assert diff(one, op("float32", "unknown")).changes == ()
    standard = op("float32", kind="Squeeze"), op("float32", "int64", kind="Squeeze")  # only one has the operand
    assert not diff(*standard).differs


def test_attributes_are_a_separate_kind_and_an_omitted_one_is_its_default() -> None:
    def op(dtype: str = "float32", **attributes: str) -> Report:
        return report(Row("n", "LayerNormalization", dtype, attributes=attributes))

    (change,) = diff(op(), op(stash_type="bfloat16")).changes
    assert (change.kind, change.variable, change.types) == ("attribute", "stash_type", "default → bfloat16")
    both = diff(op(epsilon="1e-05"), op("float16", epsilon="1e-07"))
    assert [change.kind for change in both.changes] == ["lowered", "attribute"]
    assert (both.fails(["attribute"]), both.fails(["raised"])) == (True, False)


def test_inputs_and_outputs_of_the_model_are_compared_by_name_then_by_position() -> None:
    def io(*ports: tuple[str, str], outputs: Sequence[PortRow] = (PortRow("y", "float32", 0),)) -> Report:
        x = FIRST_INPUT - [name for name, _ in ports].index("x")
        rows = (Row("n", "Relu", "float32", inputs=("float32",), outputs=("float32",), reads=(x,)),)
        inputs = tuple(PortRow(name, dtype) for name, dtype in ports)
        return Report(Header("m", 9, {}), Totals(), rows, inputs=inputs, outputs=tuple(outputs))

    one = io(("x", "float32"), ("m", "int8"))
    assert not diff(one, io(("m", "int8"), ("x", "float32"))).differs
    assert not diff(one, io(("x", "float32"), ("mask", "int8"))).differs
    (change,) = diff(one, io(("x", "float32"), ("mask", "int4"))).changes
    assert (change.kind, change.op, change.title, change.types) == (
        *("retyped", "graph input", "mask (was m)", "int8 → int4"),
    )
    assert not diff(one, io(("x", "float32"))).differs
    (change,) = diff(one, io(("x", "float32"), ("m", "int8"), outputs=[PortRow("y", "float16", 0)])).changes
    assert (change.kind, change.op) == ("lowered", "graph output")
    more = io(("x", "float32"), ("m", "int8"), outputs=[PortRow("y", "float32", 0), PortRow("z", "float32", 0)])
    assert [(c.kind, c.name) for c in diff(one, more).changes] == [("added", "z")]


def test_copies_dead_ops_and_renamed_constants_do_not_count() -> None:
    def model(text: str) -> Report:
        return inventory(onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {{ {text} }}"))

    plain = model("r = Relu (x) y = Tanh (r)")
    assert not diff(plain, model("r = Relu (x) i = Identity (r) y = Tanh (i)")).differs
    assert not diff(plain, model("r = Relu (x) d = Exp (r) y = Tanh (r)")).differs
    relu, dead = Row("r", "Relu", "float32", named=False), Row("d", "Exp", "float16", reads=(0,))
    only(diff(report(relu), report(relu, dead)), added=1)
    ops = chain("MatMul").rows
    one, two = (report(*ops, casts=[CastRow(name, "float32", "float16", readers=1)]) for name in ("x", "entry"))
    assert not diff(one, two).differs
    only(diff(one, report(*ops)), casts=1)


def test_names_of_constants_identify_similar_branches_that_swapped_places() -> None:
    def branches(*weights: tuple[str, str]) -> Report:
        rows = (Row(f"MatMul_{i}", "MatMul", t, named=False, constants=w) for i, (w, t) in enumerate(weights))
        return report(*rows, Row("Add_2", "Add", "float32", named=False, reads=(0, 1)))

    one = branches(("aaaa", "float16"), ("bbbb", "float32"))
    assert diff(one, branches(("bbbb", "float16"), ("aaaa", "float32"))).counts["raised"] == 1
    assert not diff(one, branches(("bbbb", "float32"), ("aaaa", "float16"))).differs


def test_unrelated_models_are_called_that_and_functions_are_compared_inside() -> None:
    cnn, bert = (inventory(onnx.load(TESTS / "models" / f"{name}.onnx")) for name in ("cnn_ts13", "bert_ts13"))
    delta = diff(cnn, bert)
    assert (delta.unrelated, delta.fails(), delta.text().count("\n")) == (True, True, 1)
    assert "are unrelated models: " in delta.text()
    assert delta.text(verbose=True).count("\n") > 100
    assert not diff(bert, bert).unrelated
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "l": 1]> g (float[4] x) => (float[4] y) { y = l.f (x) }'
        ' <domain: "l", opset_import: ["": 17]> f (a) => (c) { c = Exp (a) }'
    )
    assert [row.op for row in inventory(model).rows] == ["Exp"]


def test_ops_of_reordered_inputs_match_by_the_inputs_names() -> None:
    """All ops are nameless and of one type."""
    body = "a = Neg (p) b = Neg (q) c = Neg (r) y = Sum (a, b, c)"
    one, other = (
        inventory(onnx.parser.parse_model(f"{HEAD} g ({inputs}) => (float[2] y) {{ {body} }}"))
        for inputs in ("float[2] p, float[2] q, float[2] r", "float[2] r, float[2] p, float[2] q")
    )
    assert set(match(one, other)) == {(0, 0), (1, 1), (2, 2), (3, 3)}
