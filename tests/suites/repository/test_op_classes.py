"""The table of classes of operators: each word is a class, each operator exists."""

import ast
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import onnx.defs

from amp_rewrite.ir import op_classes

CLASSES = {
    name: frozenset(ops)
    for name, ops in vars(op_classes).items()
    if name.isupper() and not name.startswith("_") and isinstance(ops, frozenset | Mapping)
}


def test_each_class_has_a_description_and_each_word_of_the_table_a_class() -> None:
    source = Path(op_classes.__file__).read_text(encoding="utf-8")
    body = ast.parse(source).body
    described = {
        name.id
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    assert CLASSES.keys() <= described | {"CARRIERS"}
    assert all(CLASSES.values())
    for table in op_classes._TABLES.values():
        rows = [line.partition("=") for line in table.strip().splitlines()]
        ops = [op for _, _, ops in rows for op in ops.split()]
        assert len(ops) == len(set(ops))
        assert all(ops.split() == sorted(ops.split()) != [] for _, _, ops in rows)
    columns = op_classes._ROWS.values()
    assert {word for row in columns for word in row[2:]} == set(re.findall(r'_ops\("(\w+)"\)', source))
    verbs = {row[0].partition(":")[0] for row in columns} - {"-"}
    assert verbs == set(re.findall(r'_slots\(0, "(\w+):"\)', source))


def test_each_op_of_the_table_exists() -> None:
    from amp_rewrite.ir.schema import contrib_schemas

    names = {name.removeprefix("ai.onnx::") for name in contrib_schemas()}
    assert not {op for op in op_classes._ROWS if op not in names} - {
        schema.name for schema in onnx.defs.get_all_schemas_with_history()
    }
