"""Plant one-line faults in the package, one at a time, and count how many `make quick` finds.

    python tools/plant_faults.py [--seed N] [--faults N] [--list] [--trust] [--measured FOLDER]

Each fault lies in a wing and a file of its own, drawn by the seed: a comparison changes its sense, `and` becomes `or`,
a table loses a row, a number grows by one, a sum becomes a difference, a condition is negated.
The checkout is copied and stays as it is. The exit code is 0 if at least eight of ten faults are found.

With the folder of `select_quick.py measure`, a fault inside a function is tried only on the tests that run its line,
the keenest for their time first; those that run it in another process are left out, so that a fault may be missed
wrongly, never found wrongly.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "amp_rewrite"
QUICK = "tests/quick.txt"
ALL = ("-n", "2", f"@{QUICK}")
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
SIGNS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
}
GUARDS = (
    "strict",
    "check",
    "deterministic",
    "maxsize",
    "indent",
    "repr",
    "allow_nan",
    "ignore_cleanup_errors",
    "planned",
)
"""Arguments that guard against bugs elsewhere, lay JSON or memory out, hide parts from a debugger or forgive what a
system leaves behind: a correct program means the same with any value."""
SHARE = 0.8
"""Of the faults, to be found."""
FIRST = 25
"""Tests that are tried before the others that run a line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The text from `start` to `end`, in bytes of the file, replaced by another."""

    path: Path
    kind: str
    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def line(self, root: Path) -> int:
        return (root / self.path).read_bytes().count(b"\n", 0, self.start) + 1

    def shown(self, root: Path) -> str:
        """File, line, and the line before and after."""
        before = (root / self.path).read_bytes()
        after = self.planted(before)
        first = before.rfind(b"\n", 0, self.start) + 1
        lines = [text[first:].split(b"\n", 1)[0].decode().strip() for text in (before, after)]
        return f"{self.path}:{self.line(root)} ({self.kind})\n    - {lines[0]}\n    + {lines[1]}"


class Sites(ast.NodeVisitor):
    """The faults that a file can have, in the order of its text."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source, self.faults = path, source, list[Fault]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.visit(ast.parse(source))

    def start(self, node: ast.expr) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind: str, start: int, end: int, text: str) -> None:
        if b"\n" not in self.source[start:end]:
            self.faults.append(Fault(self.path, kind, start, end, text))

    def between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        start, end = self.end(left), self.start(right)
        before, found, after = self.source[start:end].partition(f" {old} ".encode())
        if found:
            self.add(kind, start + len(before) + 1, end - len(after) - 1, new)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are left alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are left alone: they check the package itself, for the reader and for types."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages are left alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in GUARDS:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """The -1 of a reshape is left alone: numpy infers a size from any negative number."""
        reshapes = isinstance(node.func, ast.Attribute) and node.func.attr == "reshape"
        self.visit(node.func)
        for part in (*node.args, *node.keywords):
            if not (reshapes and ast.unparse(part) == "-1"):
                self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Decorators, types and defaults are left alone."""
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self.between("comparison", left, right, *COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self.between("and/or", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("negation", self.start(node), self.start(node) + len("not "), "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SIGNS:
            self.between("arithmetic", node.left, node.right, *SIGNS[type(node.op)])
        power = isinstance(node.op, ast.LShift | ast.Pow)
        if not (power and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)):
            self.generic_visit(node)  # 1 << 20 is a large number, written in small ones

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", self.start(node), self.end(node), str(not node.value))
        elif isinstance(node.value, int) and node.value < 10:  # a large number is a limit; near it lie others as good
            self.add("off by one", self.start(node), self.end(node), str(node.value + 1))

    def _visit_table(self, node: ast.Tuple | ast.List | ast.Set) -> None:
        rows = node.elts
        if len(rows) > 2 and all(isinstance(row, ast.Constant | ast.Tuple | ast.Attribute) for row in rows):
            for row, after in pairwise(rows):
                self.add("table", self.start(row), self.start(after), "")
        self.generic_visit(node)

    visit_Tuple = _visit_table
    visit_List = _visit_table
    visit_Set = _visit_table

    def visit_Dict(self, node: ast.Dict) -> None:
        keys = node.keys
        if len(keys) > 1:
            for key, after in pairwise(keys):
                if key is not None and after is not None:
                    self.add("table", self.start(key), self.start(after), "")
        self.generic_visit(node)


def faults(root: Path, seed: int, count: int) -> list[Fault]:
    """One fault in each of `count` wings; where there are fewer wings, some have several files."""
    rng = random.Random(seed)
    wings = sorted(path for path in (root / PACKAGE).iterdir() if path.is_dir() and not path.name.startswith("_"))
    rng.shuffle(wings)
    chosen: list[Fault] = []
    for number in range(count):
        wing = wings[number % len(wings)]
        paths = sorted(path.relative_to(root) for path in wing.rglob("*.py"))
        rng.shuffle(paths)
        for path in paths:
            sites = Sites(path, (root / path).read_bytes()).faults
            if sites and path not in {fault.path for fault in chosen}:
                kind = rng.choice(sorted({fault.kind for fault in sites}))
                chosen.append(rng.choice([fault for fault in sites if fault.kind == kind]))
                break
    return chosen


def tests_by_line(measured: Path) -> dict[tuple[str, int], list[str]]:
    """The tests of the quick selection by file and line inside a function, the keenest for their seconds first."""
    from select_quick import inner_lines, keenness, records

    words = (ROOT / QUICK).read_text("utf-8").splitlines()
    places = tuple(word for word in words if not word.startswith("-"))
    out = tuple(word.partition("=")[2] for word in words if word.startswith(("--ignore", "--deselect")))
    order: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for test, (seconds, lines) in records(measured).items():
        if "::" in test and test.startswith(places) and not test.startswith(out):
            price = (seconds + 0.01) / keenness(sum(map(len, lines.values())))
            for path, numbers in lines.items():
                for number in numbers:
                    order.setdefault((path, number), []).append((price, test))
    inner = {path: inner_lines((ROOT / path).read_text("utf-8")) for path in {path for path, _ in order}}
    return {
        (path, number): [test for _, test in sorted(tests)]
        for (path, number), tests in order.items()
        if number in inner[path]
    }


def copied(folder: Path) -> None:
    """The checkout, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def failure(folder: Path, words: Sequence[str]) -> str | None:
    """The first test that fails in a copy, or what pytest died of; None if all pass."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
    except subprocess.TimeoutExpired:
        return "does not end in 900 s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0] if lines else (done.stdout + done.stderr)[-300:]


def found(folder: Path, fault: Fault) -> str | None:
    """The test of the quick selection that fails with a fault. The tests of its own wing run first."""
    source = (folder / fault.path).read_bytes()
    (folder / fault.path).write_bytes(fault.planted(source))
    left_out = [word for word in (folder / QUICK).read_text("utf-8").splitlines() if word.startswith("-")]
    try:
        return failure(folder, [f"tests/unit/{fault.path.parts[1]}", *left_out]) or failure(folder, ALL)
    finally:
        (folder / fault.path).write_bytes(source)


def found_by_those_that_run_it(folder: Path, fault: Fault, tests: Sequence[str]) -> str | None:
    """The test that fails with a fault, of tests in this order; a few first, since most faults are found at once."""
    source = (folder / fault.path).read_bytes()
    (folder / fault.path).write_bytes(fault.planted(source))
    try:
        for some in (tests[:FIRST], tests[FIRST:]):
            if some:
                (folder / "tests.txt").write_text("\n".join(some), "utf-8")
                if test := failure(folder, ["@tests.txt"]):
                    return test
        return None
    finally:
        (folder / fault.path).write_bytes(source)


def main() -> None:
    """Plant, test and count."""
    parser = argparse.ArgumentParser(description="plant one-line faults and count how many the quick tests find")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--list", action="store_true", help="show the faults, test nothing")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--measured", type=Path, help="the folder of select_quick.py measure")
    options = parser.parse_args()
    running = tests_by_line(options.measured) if options.measured else {}
    chosen = faults(ROOT, options.seed, options.faults)
    if options.list:
        print("\n".join(fault.shown(ROOT) for fault in chosen))
        return
    caught = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        start = time.monotonic()
        if not options.trust:
            if broken := failure(folder, ALL):
                raise SystemExit(f"without a fault: {broken}")
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(f"without a fault: {time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU seconds")
        for number, fault in enumerate(chosen, 1):
            start = time.monotonic()
            tests = running.get((str(fault.path), fault.line(ROOT)))
            test = found_by_those_that_run_it(folder, fault, tests) if tests else found(folder, fault)
            caught += test is not None
            print(f"{number}. {fault.shown(folder)}")
            print(f"    {time.monotonic() - start:.0f} s: {f'found by {test}' if test else 'NOT FOUND'}", flush=True)
    print(f"{caught} of {len(chosen)} found")
    sys.exit(caught < SHARE * len(chosen))


if __name__ == "__main__":
    main()
