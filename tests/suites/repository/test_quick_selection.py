"""How the tests of `make quick` are chosen: by lines per second, and what the file of arguments says then."""

from __future__ import annotations

import ast
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, TESTS

PLACE = "amp_rewrite/decide/a.py"
MODULE = "tests/unit/decide/test_a.py"
PACKAGE = {
    PLACE: "LIMIT = 3\n\n\ndef f(x):\n    if x < 1:\n        return x + 2\n    return x == 4 or not x\n",
    "amp_rewrite/files/b.py": "def g(x):\n    return x - 1\n",
    "amp_rewrite/files/c.py": "def h(x):\n    return x in (1, 2, 3)\n",
    "amp_rewrite/files/text.py": "def i(x):\n    return x\n",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, for a package of four files."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    found = import_module("select_quick")
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(found, "PACKAGE", tmp_path / "amp_rewrite")
    return found


def lines_with_faults(tool: Any) -> list[int]:
    return sorted(line for path, line in tool.chances() if path == PLACE)


def test_wings_are_alike_in_them_files_and_in_those_kinds_of_fault(tool: Any) -> None:
    found = tool.chances()
    by_file = {path: sum(chance for (place, _), chance in found.items() if place == path) for path in PACKAGE}
    assert by_file["amp_rewrite/files/b.py"] == by_file["amp_rewrite/files/c.py"] == pytest.approx(0.25)
    assert by_file["amp_rewrite/files/text.py"] == 0
    assert 0.4 < by_file[PLACE] < 0.5  # LIMIT is outside of functions
    assert lines_with_faults(tool) == [5, 6, 7]


def test_a_small_number_is_a_fault_if_it_grows_and_a_limit_is_not(tool: Any) -> None:
    faults = import_module("plant_faults").Sites(Path("a.py"), b"A = 1 << 20\nB = 10**7\nC = 64\nD = 9\n").faults
    assert [fault.planted(b"A = 1 << 20\nB = 10**7\nC = 64\nD = 9\n")[-7:] for fault in faults] == [b"D = 10\n"]


def test_arguments_that_change_no_meaning_have_no_fault(tool: Any) -> None:
    sites = import_module("plant_faults").Sites
    for text in (b"f(strict=True)", b"a.reshape(-1)", b"open_it(planned=False)", b"assert not a or b > 1"):
        assert sites(Path("a.py"), text).faults == []
    assert len(sites(Path("a.py"), b"a.reshape(-1, 4, copy=True)\na.take(-1)").faults) == 3


def test_lines_inside_functions_are_those_of_their_bodies(tool: Any) -> None:
    assert tool.inner_lines("a = 1\ndef f(b=2):\n    return (\n        b)\nc = lambda: 3\nclass D:\n    e = 4\n") == {
        3,
        4,
        5,
    }


def test_a_test_that_runs_few_lines_is_keener_than_one_that_runs_many(tool: Any) -> None:
    assert 1 > tool.keenness(1) >= tool.keenness(100) > tool.keenness(5000) > 0


def measured(lines: list[int], half: int) -> dict[str, tuple[float, dict[str, list[int]]]]:
    return {
        MODULE: (0.1, {}),
        f"{MODULE}::test_all": (1.0, {PLACE: lines}),
        f"{MODULE}::test_all_again": (50.0, {PLACE: lines}),
        f"{MODULE}::test_half": (0.2, {PLACE: lines[:half]}),
        f"{MODULE}::test_nothing_of_the_package": (2.0, {}),
        f"{MODULE}::test_a_table": (0.001, {}),
        f"{MODULE}::test_sweep[0]": (0.5, {PLACE: lines}),
        f"{MODULE}::test_sweep[1]": (30.0, {PLACE: lines}),
        "tests/unit/decide/test_b.py::test_slow": (90.0, {PLACE: lines}),
    }


def chosen(tool: Any, seconds: float) -> tuple[list[Any], list[Any]]:
    lines = lines_with_faults(tool)
    return tool.choose(measured(lines, len(lines) // 2), seconds)


def names(units: list[Any]) -> set[str]:
    return {unit.name.partition("::")[2] for unit in units}


def test_what_adds_most_per_second_is_taken_and_what_adds_nothing_is_not(tool: Any) -> None:
    taken, left = chosen(tool, 3)
    assert names(taken) == {"test_all", "test_half", "test_a_table"}
    assert names(left) == {"test_all_again", "test_nothing_of_the_package", "test_sweep", "test_slow"}
    assert names(chosen(tool, 1e4)[1]) == {"test_nothing_of_the_package"}


def test_the_arguments_are_folders_and_what_is_left_out(tool: Any) -> None:
    before = [
        "tests/unit",
        "tests/suites/harm",
        "-mnot slow and not torch and not transformers",
        "--ignore=tests/unit/ir/test_unmeasured.py",
        "--ignore=tests/unit/decide/test_a.py",
        f"--deselect={MODULE}::test_half",
        f"--deselect={MODULE}::test_unmeasured",
        "--deselect=tests/unit/decide/test_b.py::test_unmeasured",
    ]
    assert tool.words(*chosen(tool, 3), before) == [
        "tests/unit",
        *sorted((*tool.ALWAYS, "tests/suites/harm")),
        "-mnot slow and not torch and not transformers",
        "--ignore=tests/unit/decide/test_b.py",
        "--ignore=tests/unit/ir/test_unmeasured.py",
        f"--deselect={MODULE}::test_all_again",
        f"--deselect={MODULE}::test_nothing_of_the_package",
        f"--deselect={MODULE}::test_sweep",
        f"--deselect={MODULE}::test_unmeasured",
    ]


def test_a_short_test_is_taken_whatever_it_adds(tool: Any) -> None:
    short = {MODULE: (0.1, {}), f"{MODULE}::test_short": (tool.CHEAP / 2, {})}
    assert names(tool.choose(short, 3)[0]) == {"test_short"}


def test_nothing_is_left_out_whose_name_begins_that_of_a_chosen_test(tool: Any) -> None:
    taken, left = ([tool.Unit(f"{MODULE}::{name}", 1, 1.0, cheap=False)] for name in ("test_all_again", "test_all"))
    assert [word for word in tool.words(taken, left, []) if "deselect" in word] == []


def test_measurements_of_several_runs_are_read_and_failed_tests_are_not(tool: Any, tmp_path: Path) -> None:
    runs = {"1.pickle": [("a::t", 1.0, True, {}), ("a::u", 1.0, False, {})], "2.pickle": [("a::t", 2.0, True, {})]}
    for name, rows in runs.items():
        (tmp_path / name).write_bytes(b"".join(map(pickle.dumps, rows)) + b"\x80")  # a run that was interrupted
    assert tool.records(tmp_path) == {"a::t": (2.0, {})}


def defined(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_the_selection_names_tests_that_exist() -> None:
    words = (TESTS / "quick.txt").read_text("utf-8").splitlines()
    assert "tests/unit" in words  # of every wing
    inherited = defined(TESTS / "support" / "train" / "vjp_case.py")
    for place in (word.split("=", 1)[-1] for word in words if not word.startswith("-m")):
        path, *parts = place.split("::")
        assert (ROOT / path).exists(), place
        assert not parts or parts[-1].partition("[")[0] in inherited | defined(ROOT / path), place
