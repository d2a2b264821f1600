import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import onnx.defs
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConfigError, ListError
from amp_rewrite.settings.list_entry import Color, _same
from amp_rewrite.settings.op_lists import OpLists, environment_edits, lists_folder, load_lists
from support.paths import ROOT

SHIPPED = [(to, base) for to in (DType.FLOAT16, DType.BFLOAT16) for base in ("float16", "bfloat16", "tensorflow")]


def color(lists: OpLists, op_type: str, domain: str = "", operands: int = 1, **attributes: object) -> str:
    return lists.classify(domain, op_type, attributes, operands).color.value


def ops(lists: OpLists, *colors: str) -> list[tuple[str, str]]:
    return sorted((entry.name, str(entry.condition)) for entry in lists if entry.color.value in colors)


def overlaid(tmp_path: Path, text: str, to: DType = DType.FLOAT16) -> OpLists:
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return load_lists(to, [path])


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ListError) as caught:
        overlaid(tmp_path, text)
    return str(caught.value)


@pytest.mark.parametrize(("to", "base"), SHIPPED)
def test_every_op_of_onnx_and_of_onnxruntime_has_a_class_and_a_reason(to: DType, base: str) -> None:
    table = json.loads((files("amp_rewrite") / "runtime" / "_tables" / "contrib_schemas.json").read_text("utf-8"))
    lists = load_lists(to, [base])
    listed = {key for key, entries in lists.entries.items() if entries}
    schemas = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()}
    own = {tuple(name.split("::")) for name in table["ops"] if name.startswith("com.microsoft::")}
    assert own and sorted((schemas | own) - listed) == []
    assert [entry for entry in lists if entry.because == "no reason given"] == []


@pytest.mark.parametrize("path", sorted(lists_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_pass_the_checks_of_user_files_and_are_sorted(path: Path) -> None:
    load_lists(DType.FLOAT16, [path])
    document = yaml.safe_load(path.read_text("utf-8"))
    for key in {"allow", "gray", "clear", "deny", "unlisted"} & document.keys():
        names = [entry["op"].rpartition("::")[::2] for entry in document[key]]
        assert names == sorted(names), key


def test_bfloat16_lists_move_sums_and_means_to_gray() -> None:
    float16, bfloat16 = load_lists(DType.FLOAT16), load_lists(DType.BFLOAT16)
    ops = {key[1] for key in float16.entries if key[0] == ""}
    moved = {op: color(bfloat16, op) for op in sorted(ops) if color(float16, op) != color(bfloat16, op)}
    assert moved == dict.fromkeys(
        ("Einsum", "ReduceL1", "ReduceLogSum", "ReduceMean", "ReduceProd", "ReduceSum"), "gray"
    )


def test_reading_the_shipped_lists_does_not_import_onnx() -> None:
    code = (
        "import sys; from amp_rewrite.settings.op_lists import load_lists; from amp_rewrite.dtypes import DType;"
        "load_lists(DType.BFLOAT16, ['tensorflow']); sys.exit('onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_an_absent_attribute_counts_as_its_onnx_default() -> None:
    lists = load_lists(DType.FLOAT16)
    assert color(lists, "Resize") == "clear"
    assert color(lists, "Resize", mode=b"nearest") == "clear"
    assert color(lists, "Resize", mode=b"cubic") == "gray"
    reductions = {r: color(lists, "ScatterND", reduction=r) for r in ("none", "add", "mul", "max", "min")}
    assert reductions == {"none": "clear", "add": "deny", "mul": "deny", "max": "clear", "min": "clear"}
    assert color(lists, "ScatterND") == "clear"


def test_all_tests_of_a_condition_must_hold(tmp_path: Path) -> None:
    lists = overlaid(tmp_path, "deny: [{op: Gemm, when: {transA: 1, operands: 3}}]")
    seen = {(n, t): color(lists, "Gemm", operands=n, transA=t) for n in (2, 3, 4) for t in (0, 1)}
    assert {case for case, found in seen.items() if found == "deny"} == {(3, 1), (4, 1)}
    assert str(lists.entries_of("", "Gemm")[0].condition) == "transA=1, operands>=3"


@pytest.mark.parametrize("domain", ["", "ai.onnx.ml", "com.microsoft"])
def test_an_unknown_op_of_a_known_domain_is_refused(tmp_path: Path, domain: str) -> None:
    with pytest.raises(ListError, match="unknown op"):
        overlaid(tmp_path, f"deny: ['{domain}::Nonesuch']" if domain else "deny: [Nonesuch]")
    assert color(overlaid(tmp_path, "deny: ['my.domain::Nonesuch']"), "Nonesuch", "my.domain") == "deny"


def test_an_overlay_adds_and_moves_ops_and_records_its_source(tmp_path: Path) -> None:
    lists = overlaid(tmp_path, "deny:\n  - Softmax\n  - {op: my.domain::Fancy, because: ours}\nunlisted: [MatMul]\n")
    moved = [
        lists.classify(domain, op, {}, 2) for domain, op in (("", "Softmax"), ("my.domain", "Fancy"), ("", "MatMul"))
    ]
    assert [(entry.color.value, entry.because, entry.source) for entry in moved] == [
        ("deny", "no reason given", "my.yaml:2"),
        ("deny", "ours", "my.yaml:3"),
        ("unlisted", "no reason given", "my.yaml:4"),
    ]
    assert color(lists, "Exp") == "deny"
    assert lists.name == "float16+my.yaml"


def test_an_unconditional_entry_replaces_earlier_conditional_ones(tmp_path: Path) -> None:
    whole = overlaid(tmp_path, "deny: [Resize]")
    assert (color(whole, "Resize", mode="nearest"), color(whole, "Resize", mode="cubic")) == ("deny", "deny")
    assert [entry.source for entry in whole.entries_of("", "Resize")] == ["my.yaml:1"]
    part = overlaid(tmp_path, "deny: [{op: Resize, when: {mode: cubic}}]")
    modes = [color(part, "Resize", mode=mode) for mode in ("nearest", "linear", "cubic")]
    assert modes == ["clear", "gray", "deny"]
    same = overlaid(tmp_path, "deny: [{op: Resize, when: {mode: nearest}}]")
    assert (color(same, "Resize"), color(same, "Resize", mode="linear")) == ("deny", "gray")
    assert [entry.color for entry in same.entries_of("", "Resize")] == [Color.DENY, Color.GRAY]


def test_conditional_entries_leave_other_cases_unlisted(tmp_path: Path) -> None:
    lists = overlaid(tmp_path, "base: empty\nallow: [{op: Einsum, when: {operands: 2}}]")
    entry = lists.classify("", "Einsum", {}, 1)
    assert (entry.color, entry.because) == (Color.UNLISTED, "meets none of its conditions")


def test_later_overlays_win_and_bases_are_applied_first(tmp_path: Path) -> None:
    deny, gray = {"deny": ["MatMul"]}, {"gray": ["MatMul"]}
    assert color(load_lists(DType.FLOAT16, [deny, gray]), "MatMul") == "gray"
    assert color(load_lists(DType.FLOAT16, ["tensorflow", deny]), "CumSum") == "unlisted"
    with pytest.raises(ListError, match=r"^tensorflow: a list with a base discards the lists before it"):
        load_lists(DType.FLOAT16, [deny, "tensorflow"])
    with pytest.raises(ListError, match=r"^<mapping>: a list with a base discards"):
        load_lists(DType.FLOAT16, [deny, {"base": "empty"}])


def test_the_fingerprint_depends_on_decisions_and_not_on_reasons() -> None:
    plain = load_lists(DType.FLOAT16).fingerprint
    assert (
        load_lists(DType.FLOAT16, [{"deny": [{"op": "Exp", "need": "range", "because": "else"}]}]).fingerprint == plain
    )
    assert load_lists(DType.FLOAT16, [{"deny": ["Exp"]}]).fingerprint != plain
    assert load_lists(DType.FLOAT16, [{"unlisted": ["my.domain::Op"]}]).fingerprint == plain
    assert load_lists(DType.FLOAT16, [{"gray": ["Exp"]}]).fingerprint != plain
    assert len({load_lists(to, [base]).fingerprint for to, base in SHIPPED}) == 4


KEYS = "base, allow, gray, clear, deny, unlisted"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allow: [Exp]\ndeny: [Exp]", "2: op 'Exp' is on 'allow' (my.yaml:1) and on 'deny'; keep one"),
        ("deny:\n- Exp\n- ai.onnx::Exp", "3: op 'Exp' is on 'deny' (my.yaml:2) and on 'deny'; keep one"),
        (
            "deny:\n- {op: Resize, when: {mode: cubic}}\n- {op: Resize, when: {mode: cubic}}",
            "3: op 'Resize' is on 'deny' (my.yaml:2) and on 'deny' when mode=cubic; keep one",
        ),
        ("dney:\n- Exp", "1: unknown key 'dney'; did you mean 'deny'?"),
        ("white: [Exp]", f"1: unknown key 'white'; use one of {KEYS}"),
        ("\ndeny: [Sofmax]", "2: unknown op 'Sofmax'; did you mean 'Softmax'?"),
        ("deny: [FastGelu]", "1: unknown op 'FastGelu'; did you mean 'com.microsoft::FastGelu'?"),
        (
            "deny: ['com.microsoft::MatMul4Bits']",
            "1: unknown op 'com.microsoft::MatMul4Bits'; did you mean 'com.microsoft::MatMulNBits'?",
        ),
        ("deny: [Qqqqqqq]", "1: unknown op 'Qqqqqqq'; a custom op needs its domain, as in my.domain::Op"),
        ("deny: [a b]", "1: 'a b' is not an op; write Op or domain::Op"),
        ("deny: [[Exp]]", "1: an op must be a string, not a list"),
        ("deny: Exp", "1: 'deny' must be a list of ops, not 'Exp'"),
        ("- Exp", f"1: a list file must be a mapping with keys among {KEYS}, not a list"),
        ("base: float8", "1: unknown base 'float8'; use one of empty, float16, bfloat16, tensorflow"),
        ("deny:\n- {because: x}", "2: an entry is missing 'op'; for example, write {op: Exp, because: a reason}"),
        ("deny:\n- op: Exp\n  why: x", "3: unknown key 'why'; use one of op, when, need, because"),
        ("deny: [{op: Exp, because: [x]}]", "1: 'because' must be a string, not a list"),
        ("gray: [{op: Exp, need: range}]", "1: 'need' is not allowed in 'gray', only in deny and unlisted; remove it"),
        ("deny: [{op: Exp, need: rang}]", "1: unknown need 'rang'; did you mean 'range'?"),
        ("deny: [{op: Exp, need: [range]}]", "1: 'need' must be a string, not a list"),
        ("deny: [{op: Exp, when: x}]", "1: 'when' must be a mapping such as {mode: nearest}, not 'x'"),
        ("deny: [{op: Resize, when: {mod: x}}]", "1: Resize has no attribute 'mod'; did you mean 'mode'?"),
        (
            "deny: [{op: Exp, when: {zzz: x}}]",
            "1: Exp has no attribute 'zzz'; use one of consumed_inputs, operands (the number of inputs)",
        ),
        ("deny: [{op: Resize, when: {mode: ~}}]", "1: a value of 'mode' must be a string, not nothing"),
        ("deny: [{op: Resize, when: {mode: []}}]", "1: 'mode' has no value to test for; give one value, or a list"),
        (
            "deny: [{op: Einsum, when: {operands: many}}]",
            "1: 'operands' must be a number of inputs, such as 2, not 'many'",
        ),
        (
            f"deny: [{{op: Einsum, when: {{operands: {'9' * 5000}}}}}]",
            f"1: 'operands' must be a number of inputs, such as 2, not '{'9' * 5000}'",
        ),
        ("deny: [Exp]\ndeny: [Pow]", "2: key 'deny' appears twice; keep one"),
        ("deny:\n- op: Exp\n  op: Pow", "3: key 'op' appears twice; keep one"),
        ("[deny]: [Exp]", "1: a key must be a string, not a list"),
        ("deny: &x [Exp]\n", "1: YAML anchors, aliases and tags are not supported; write the entry out"),
        ("deny: [*x]\n", "1: YAML anchors, aliases and tags are not supported; write the entry out"),
        ("deny: [!!str x]", "1: YAML anchors, aliases and tags are not supported; write the entry out"),
        (
            "deny: [Exp]\n---\ndeny: [Pow]",
            "3: a second YAML document starts here; a list file must be a single mapping",
        ),
        ("deny: [" + "[" * 5000, "1: the op list is nested too deeply; flatten it"),
    ],
)
def test_a_bad_list_is_refused_with_file_line_and_advice(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == f"my.yaml:{message}"


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ListError, match=r"^tensorflw: no such list file; did you mean 'tensorflow'\?$"):
        load_lists(DType.FLOAT16, ["tensorflw"])
    with pytest.raises(ListError, match=r"gone\.yaml: no such list file; the shipped lists are float16"):
        load_lists(DType.FLOAT16, [tmp_path / "gone.yaml"])
    with pytest.raises(ListError, match="cannot read"):
        load_lists(DType.FLOAT16, [tmp_path])
    path = tmp_path / "my.yaml"
    path.write_bytes(b"deny:\n- \xff\n")
    with pytest.raises(ListError, match=r"my\.yaml is not UTF-8"):
        load_lists(DType.FLOAT16, [path])
    path.write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(ListError, match="larger than 1024 KiB"):
        load_lists(DType.FLOAT16, [path])


def nested(wrap: Callable[[Any], Any], depth: int) -> dict[str, Any]:
    part: Any = "Exp"
    for _ in range(depth):
        part = wrap(part)
    return {"deny": part}


def test_a_mapping_is_checked_like_a_file() -> None:
    lists = load_lists(DType.FLOAT16, [{"deny": [{"op": "Resize", "when": {"mode": ("linear", "cubic")}}, "Softmax"]}])
    assert (color(lists, "Resize", mode="linear"), color(lists, "Softmax")) == ("deny", "deny")
    assert lists.classify("", "Softmax", {}, 1).source == "<mapping>"
    for mapping, message in (
        ({"deny": ["Exp", "Exp"]}, "<mapping>: op 'Exp' is on 'deny'"),
        ({"dney": []}, "<mapping>: unknown key 'dney'"),
        (nested(lambda part: {"when": part}, 7), "<mapping>: 'deny' must be a list of ops, not a mapping"),
        (nested(lambda part: {"when": part}, 8), "<mapping>: the op list is nested too deeply"),
        (nested(lambda part: [part], 7), "<mapping>: an op must be a string, not a list"),
        (nested(lambda part: [part], 8), "<mapping>: the op list is nested too deeply"),
    ):
        with pytest.raises(ListError) as caught:
            load_lists(DType.FLOAT16, [mapping])
        assert str(caught.value).startswith(message)


@settings(max_examples=60)
@given(st.text(st.sampled_from("deny allow:-[]{},'\"\n #&*!|>~0.<=Exp"), max_size=60))
def test_any_text_is_either_a_list_or_a_list_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("lists") / "any.yaml"
    path.write_text(text)
    try:
        lists = load_lists(DType.FLOAT16, [path])
    except ListError as error:
        assert str(error).startswith(path.name)
    else:
        assert lists.name == "float16+any.yaml"


def test_levels_change_only_their_lists() -> None:
    lists = load_lists(DType.FLOAT16)
    for level in ("default", "unsafe-force-all", "lower-all"):
        assert lists.at_level(level) is lists
    bare = lists.at_level("tensor-cores-only")
    assert ops(bare, "allow") == ops(lists, "allow")
    assert {entry.color.value for entry in bare} == {"allow", "unlisted"}
    strict = lists.at_level("treat-gray-as-deny")
    assert ops(strict, "deny") == ops(lists, "gray", "deny")
    was, now = lists.classify("", "Add", {}, 2), strict.classify("", "Add", {}, 2)
    assert (now.source, now.because) == (was.source, f"level treat-gray-as-deny, otherwise gray: {was.because}")


def test_the_environment_moves_ops_after_the_overlays() -> None:
    edits = environment_edits(
        {
            "AMP_REWRITE_DENYLIST_ADD": "Softmax, my.domain::Fancy,",
            "AMP_REWRITE_GRAYLIST_REMOVE": "Softmax,Add",
            "AMP_REWRITE_CLEARLIST_REMOVE": "Resize",
            "AMP_REWRITE_LISTS": "not ours",
            "PATH": "/bin",
        }
    )
    lists = load_lists(DType.FLOAT16, [{"gray": ["Exp"]}], edits)
    assert [color(lists, op) for op in ("Softmax", "Add", "Exp")] == ["deny", "unlisted", "gray"]
    assert (color(lists, "Resize", mode="nearest"), color(lists, "Resize", mode="linear")) == ("unlisted", "gray")
    assert color(lists, "Fancy", "my.domain") == "deny"
    entry = lists.classify("", "Softmax", {}, 1)
    assert (entry.because, entry.source) == ("put on the deny list", "AMP_REWRITE_DENYLIST_ADD")
    assert lists.name == "float16+<mapping>+environment"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("DENYLIST_ADD=Sofmax", ListError, "_DENYLIST_ADD: unknown op 'Sofmax'; did you mean 'Softmax'?"),
        (
            "DENYLIST_ADD=Exp ALLOWLIST_ADD=Exp",
            ListError,
            "_DENYLIST_ADD: op 'Exp' is also in _ALLOWLIST_ADD; keep one",
        ),
        (
            "INFERLIST_ADD=Exp",
            ConfigError,
            "unknown environment variable _INFERLIST_ADD; use _{ALLOW,GRAY,DENY,CLEAR}LIST_{ADD,REMOVE}",
        ),
    ],
)
def test_a_bad_variable_is_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        environment_edits(dict(f"AMP_REWRITE_{word}".split("=") for word in text.split()))
    assert str(caught.value).replace("AMP_REWRITE", "") == message


@pytest.mark.parametrize(
    ("actual", "wanted", "same"),
    [
        (b"nearest", "nearest", True),
        (b"nearest", "1", False),
        (0.10000000149011612, "0.1", True),
        (0.1001, "0.1", False),
        (1.0, "1", True),
        (1.0, "x", False),
        (1 << 26, "67108865", False),
        (3, "3", True),
        (None, "0", False),
    ],
)
def test_an_attribute_matches_in_type_and_value(actual: object, wanted: str, same: bool) -> None:
    assert _same(actual, wanted) is same
