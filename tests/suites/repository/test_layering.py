"""Imports between modules follow the list of wings in docs/architecture.md."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from onnx.parser import parse_model

from support.paths import ROOT

PACKAGE = ROOT / "amp_rewrite"
ENTRANCES = {"__init__", "__main__"}
"""They re-export names of the wings and belong to none."""

# Third-party and standard modules that only some of ours may import.
CONFINED = {
    "yaml": {"settings.list_entry", "settings.op_lists"},
    "onnxruntime": {"runtime.installation", "runtime.probes", "runtime.runner"},
    "click": {"cli"},
    "rich": {"cli"},
}
WITHOUT_ONNX = tuple(
    f"reports.{name}" for name in ("report", "rows", "result", "render", "explain", "diff", "summary", "evidence")
)
"""Reports are read, compared and explained without onnx, which is slow to import."""


@cache
def wings() -> dict[str, int]:
    """Return the position of each wing in the table; top-level modules come first."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("## The wings")[2].partition("\n## ")[0]
    return {name: number for number, name in enumerate(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE), 1)}


def position(module: str) -> int:
    return wings().get(module.split(".")[0], 0)


@cache
def trees() -> dict[str, tuple[ast.Module, ...]]:
    """Parse each module, by dotted name."""
    found: dict[str, list[ast.Module]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] != "__init__" or len(parts) == 1:
            found.setdefault(".".join(parts), []).append(ast.parse(path.read_text("utf-8")))
    return {module: tuple(parsed) for module, parsed in found.items()}


def imports(tree: ast.AST, *, at_start: bool = False) -> Iterator[str]:
    """Yield the dotted names that a tree imports; `at_start` omits functions and imports for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif at_start and (_runs_later(node) or _for_type_checkers(node)):
            continue
        else:
            yield from imports(node, at_start=at_start)


def _runs_later(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def own_imports(module: str, *, at_start: bool = False) -> set[str]:
    """Return a module's imports from this package."""
    named = {name for tree in trees()[module] for name in imports(tree, at_start=at_start)}
    inside = {name.removeprefix("amp_rewrite.") for name in named if name.startswith("amp_rewrite.")}
    return {m for m in trees().keys() - {module} if any(f"{name}.".startswith(f"{m}.") for name in inside)}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for tree in trees()[module] for name in imports(tree)} - {"amp_rewrite"}


def test_the_list_of_wings_matches_the_folders() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert set(wings()) == folders
    assert len(wings()) == 13


def test_a_module_imports_only_from_its_wing_and_earlier_ones() -> None:
    modules = trees().keys() - ENTRANCES
    after = {(m, other) for m in modules for other in own_imports(m) if position(other) > position(m)}
    assert not after


def test_modules_have_no_circular_imports() -> None:
    """Late imports and those for type checkers also count."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edges_from((a, b) for a in trees().keys() - ENTRANCES for b in own_imports(a))
    assert [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


@pytest.mark.parametrize("foreign", CONFINED)
def test_some_libraries_are_imported_in_one_place_only(foreign: str) -> None:
    users = {m for m in trees() if foreign in foreign_imports(m)} - CONFINED[foreign]
    users = {m for m in users if m.split(".")[0] not in CONFINED[foreign]}
    assert not users


@pytest.mark.parametrize("foreign", ["onnxruntime"])
def test_slow_libraries_are_imported_inside_functions(foreign: str) -> None:
    starts = {
        m
        for m, parsed in trees().items()
        for tree in parsed
        for n in imports(tree, at_start=True)
        if n.split(".")[0] == foreign
    }
    assert starts == set()


def test_readers_of_reports_do_not_import_onnx() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edges_from((a, b) for a in trees() for b in own_imports(a, at_start=True))
    needed = {*WITHOUT_ONNX, *(m for module in WITHOUT_ONNX for m in nx.descendants(graph, module))}
    users = {
        m for m in needed for tree in trees()[m] for n in imports(tree, at_start=True) if n.split(".")[0] == "onnx"
    }
    assert users == set()


@pytest.mark.parametrize("start", ["amp_rewrite.convert({!r})", "amp_rewrite.cli.program.main([{!r}, '--no-check'])"])
def test_a_conversion_without_a_check_imports_nothing_of_checks_and_batches(start: str, tmp_path: Path) -> None:
    """It imports neither evidence nor fleet, and only kernels and faults of the runtime."""
    model = tmp_path / "model.onnx"
    graph = parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4,4] x) => (float[4,4] y) { y = MatMul (x, x) }'
    )
    model.write_bytes(graph.SerializeToString())
    run = f"try: {start.format(str(model))}\nfinally: print(*sys.modules, file=sys.stderr)"
    code = f"import sys, amp_rewrite, amp_rewrite.cli\n{run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {name.removeprefix("amp_rewrite.") for name in done.stderr.split() if name.startswith("amp_rewrite.")}
    assert {"decide.plan", "runtime.kernels"} <= own
    assert not [name for name in own if name.split(".")[0] in ("evidence", "fleet", "deploy", "train")]
    allowed = {"kernels", "faults", "providers"}
    assert {name.split(".")[1] for name in own if name.startswith("runtime.")} <= allowed


def test_only_the_modules_for_files_read_and_write_onnx_files() -> None:
    touching = {
        module
        for module, parsed in trees().items()
        for tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("onnx.load", "onnx.save", "onnx.load_model", "onnx.save_model")
    }
    assert touching <= {"files.model", "files.loading", "files.wire", "files.store"}


def test_only_the_command_line_prints_and_exits() -> None:
    users = {
        module
        for module, parsed in trees().items()
        for tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit")
    }
    assert {module.split(".")[0] for module in users} <= {"cli", "__main__"}


def test_hidden_imports_are_found() -> None:
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g\n")
    assert list(imports(tree)) == ["a.b", "c.d", "e", "g"]
    assert list(imports(tree, at_start=True)) == ["a.b", "c.d"]
