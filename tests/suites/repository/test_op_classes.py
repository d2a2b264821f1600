"""Classes of operators stand in `ir/op_classes` alone: no other module repeats one, or one but for an op."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import onnx.defs
import pytest

import amp_rewrite
from amp_rewrite.ir import op_classes

PACKAGE = Path(amp_rewrite.__file__).parent
CLASSES = {
    name: frozenset(ops)
    for name, ops in vars(op_classes).items()
    if name.isupper() and not name.startswith("_") and isinstance(ops, frozenset | Mapping)
}
KNOWN = frozenset(schema.name for schema in onnx.defs.get_all_schemas()).union(*CLASSES.values())

PATTERNS = ("ir/patterns/", "rewrite/contrib/fuse.py")
"""Where written-out operators are recognized: the operators that one operand of a pattern may be are no class."""

ELSEWHERE = {
    (
        "rewrite/attention/recognize.py",
        "Cast Identity",
    ): "attentions have no Dropout, which SEEN_THROUGH has",
    ("rewrite/autodiff/vjp/elementwise.py", "Ceil Floor Round Sign"): "operators that share a gradient rule",
}
"""Literals that are near a class on purpose, each with the reason."""


def literals(tree: ast.AST) -> Iterator[tuple[int, frozenset[str]]]:
    """Each literal group of operators: a tuple, list or set, names in one text, arguments, `== … or == …`, and a dict
    whose values are all alike."""
    for node in ast.walk(tree):
        items: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = [*node.elts]
        elif isinstance(node, ast.Dict) and len({ast.dump(value) for value in node.values}) == 1:
            items = [*node.keys]
        elif isinstance(node, ast.Call):
            items = [item for item in node.args if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.BoolOp):
            equal = [v for v in node.values if isinstance(v, ast.Compare) and isinstance(v.ops[0], ast.Eq | ast.NotEq)]
            items = [v.comparators[0] for v in equal]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            if len(words) > 1 and KNOWN.issuperset(words):
                yield node.lineno, frozenset(words)
        names = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        if len(names) > 1 and len(names) == len(items) and KNOWN.issuperset(names):
            yield node.lineno, frozenset(names)


def repeated(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The literals that are a class, or differ from one by an op, with the class."""
    for line, ops in literals(tree):
        near = [name for name, members in CLASSES.items() if len(ops ^ members) <= 1]
        if near:
            yield line, " ".join(sorted(ops)), near[0]


def test_no_module_repeats_a_class() -> None:
    found, excused = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        if where == "ir/op_classes.py" or where.startswith(PATTERNS):
            continue
        for line, ops, name in repeated(ast.parse(path.read_text(encoding="utf-8"))):
            if (where, ops) in ELSEWHERE:
                excused.add((where, ops))
            else:
                found.append(f"{where}:{line}: {ops}: derive it from op_classes.{name}")
    assert not found, "\n".join(found)
    assert excused == ELSEWHERE.keys()


@pytest.mark.parametrize(
    "text",
    [
        'x = op.kind in ("Shape", "Size")',
        'x = op.kind in {"Size", "Shape", "Cast"}',
        'x = frozenset(("LSTM", "GRU"))',
        'x = op.kind == "Shape" or op.kind == "Size"',
        'x = "Shape Size".split()',
        'x = {"Shape": (0,), "Size": (0,)}',
        'x = matcher.up(value, "Add", "Sub", "Sum")',
    ],
)
def test_a_repeated_class_is_seen(text: str) -> None:
    assert list(repeated(ast.parse(text)))


def test_other_groups_are_let_be() -> None:
    text = 'x = op.kind in ("Log", "Atanh")\ny = {"Mul": (0, 1), "Div": (0,)}\nz = [("a", "b"), ("Shape", name)]'
    assert not list(repeated(ast.parse(text)))


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
