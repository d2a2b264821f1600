"""The table of ops and its sets: each trait has a set, each op exists, each set has a description."""

import ast
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import onnx.defs
import yaml

from amp_rewrite.ir import op_classes, ops
from amp_rewrite.ir.ops import OPS, Trait
from amp_rewrite.ir.schema import contrib_schemas
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import lists_folder

SOURCE = Path(op_classes.__file__).read_text(encoding="utf-8")
CLASSES = {
    name: frozenset(ops)
    for name, ops in vars(op_classes).items()
    if name.isupper() and name != "OPS" and isinstance(ops, frozenset | Mapping)
}


def test_each_set_has_ops_and_a_description() -> None:
    lines = SOURCE.splitlines()
    described = {
        name.id
        for node, after in pairwise(ast.parse(SOURCE).body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        if isinstance(after, ast.Expr) or "  # " in lines[(node.end_lineno or 0) - 1]
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    assert CLASSES.keys() <= described
    assert all(CLASSES.values())


def test_no_op_has_two_rows() -> None:
    """A later row would silently replace an earlier one."""
    calls = [node for node in ast.walk(ast.parse(Path(ops.__file__).read_text("utf-8"))) if isinstance(node, ast.Call)]
    starts = {"_rows": "", "_contrib": "com.microsoft::"}
    named = [(starts[f], call.args[0].value) for call in calls if call.args and (f := ast.unparse(call.func)) in starts]  # type: ignore[attr-defined]
    words = [start + word for start, words in named for word in words.split()]
    assert len(words) > 200 and sorted(words) == sorted(set(words))


def test_each_trait_has_ops_and_a_set() -> None:
    assert {trait for row in OPS.values() for trait in row.traits} == set(Trait)
    assert set(re.findall(r"Trait\.(\w+)", SOURCE)) == {trait.name for trait in Trait}


def test_each_op_of_a_shipped_list_has_a_row() -> None:
    """Without one, facts and needs stop at the op, and a product is not a compute op."""
    tables = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(lists_folder().glob("*.yaml"))]
    colors = (Color.ALLOW, Color.GRAY, Color.CLEAR, Color.DENY)
    listed = {entry["op"] for table in tables for color in colors for entry in table.get(color.value, ())}
    assert len(listed) > 200
    assert listed - OPS.keys() == set()


def test_each_op_of_the_table_exists() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    known |= {name.removeprefix("ai.onnx::") for name in contrib_schemas()}
    assert OPS.keys() - known == set()
    assert set().union(*CLASSES.values()) - known == set()
