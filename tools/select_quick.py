"""Choose the tests of `make quick` by what each covers and costs, and write tests/quick.txt.

    python tools/select_quick.py measure FOLDER [PYTEST ARGUMENTS]
    python tools/select_quick.py choose FOLDER [--seconds N] [--write]

`measure` runs tests with coverage.py (`pip install coverage`) and leaves in a folder the processor seconds of each test
and the lines of the package that it runs. Several runs may leave theirs in one folder; the last one of a test counts.
`choose` takes the tests that find most faults for their time. A fault may lie in each line that plant_faults.py can
change, all files of a wing and all wings alike; the fewer lines a test runs, the likelier it finds a fault in one of
them. The file lists what is left out, so that new tests belong to the selection until the next measurement.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import math
import os
import pickle
import re
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "amp_rewrite"
QUICK = ROOT / "tests" / "quick.txt"
FOLDER = "tests/unit"
"""Run whole, but for what is left out."""
VARIABLE = "AMP_REWRITE_MEASURE"
SECONDS = 240
"""Processor seconds of the tests chosen, as measured: coverage.py about doubles them."""
CHEAP = 0.5
"""Seconds of a test, with all its parameters, up to which it is always chosen; the file names the few others."""
ALWAYS = (
    "tests/suites/models/test_golden_digests.py",
    "tests/suites/models/test_golden_products.py",
    "tests/suites/pages/test_generated_pages.py",
    "tests/suites/repository/test_public_names.py",
)
"""Always chosen likewise: they compare all that many lines make, such as reports, models, pages and names."""


# -- measuring: this file is a plugin of pytest ------------------------------------------------------------


def spent() -> float:
    """Processor seconds of this process and of the children that it waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class Recorder:
    """Writes of each test its seconds and the lines that it ran, and of each module the seconds of its import."""

    def __init__(self, out: IO[bytes]) -> None:
        import coverage

        self.out, self.failed = out, set[str]()
        self.cover = coverage.Coverage(data_file=None, include=[f"{PACKAGE}/*"], config_file=False)
        self.cover.start()

    def lines(self) -> dict[str, list[int]]:
        """The lines run since the last call, by file."""
        seen = {}
        for name, numbers in list(self.cover._collector.data.items()):
            if numbers:
                seen[str(Path(name).relative_to(ROOT))] = sorted(numbers)
                numbers.clear()
        return seen

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        before = spent()
        report = yield
        if isinstance(collector, pytest.Module):
            pickle.dump((collector.nodeid, spent() - before, True, {}), self.out)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.lines()
        before = spent()
        result = yield
        seconds = spent() - before
        pickle.dump((item.nodeid, seconds, item.nodeid not in self.failed, self.lines()), self.out)
        self.out.flush()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Record in each process that runs tests."""
    folder = os.environ.get(VARIABLE)
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder((Path(folder) / f"{time.time_ns()}.pickle").open("wb")))


def measure(folder: Path, words: list[str]) -> int:
    """Run pytest with this plugin."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", *words]
    environ = {**os.environ, "PYTHONPATH": path, VARIABLE: str(folder.absolute())}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def records(folder: Path) -> dict[str, tuple[float, dict[str, list[int]]]]:
    """Seconds and lines by test, of those that passed; modules by their path."""
    found = {}
    for path in sorted(folder.glob("*.pickle")):
        with path.open("rb") as file:
            while True:
                try:
                    name, seconds, passed, lines = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                if passed:
                    found[name] = seconds, lines
    return found


# -- choosing ----------------------------------------------------------------------------------------------


def chances() -> dict[tuple[str, int], float]:
    """The chance of a line inside a function that a planted fault lies there."""
    from plant_faults import Sites

    found: dict[tuple[str, int], float] = defaultdict(float)
    wings = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
    for wing in wings:
        files = {path.relative_to(ROOT): Sites(path, path.read_bytes()) for path in wing.rglob("*.py")}
        files = {path: sites for path, sites in files.items() if sites.faults}
        for path, sites in files.items():
            inside = inner_lines(sites.source.decode())
            alike = Counter(fault.kind for fault in sites.faults)
            for fault in sites.faults:
                line = bisect_right(sites.lines, fault.start)
                if line in inside:
                    found[str(path), line] += 1 / (len(wings) * len(files) * len(alike) * alike[fault.kind])
    return found


def inner_lines(text: str) -> set[int]:
    """The lines inside functions: those outside run when a module is imported, whatever a test does."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.Lambda))
    found: set[int] = set()
    for node in functions:
        first = node.body[0].lineno if isinstance(node, ast.FunctionDef) else node.lineno
        found.update(range(first, (node.end_lineno or first) + 1))
    return found


@dataclass
class Unit:
    """A test with all its parameters."""

    name: str
    tests: int
    seconds: float
    cheap: bool
    finds: dict[int, float] = field(default_factory=dict)
    """The chance to find a fault in a line, by line."""

    @property
    def module(self) -> str:
        return self.name.partition("::")[0]


def keenness(lines: int) -> float:
    """The chance that a test notices a fault in one of the lines that it runs: an assumption, not a measurement."""
    return 0.7 * min(1.0, (100 / max(lines, 1)) ** 0.25)


def units(measured: dict[str, tuple[float, dict[str, list[int]]]], numbers: dict[tuple[str, int], int]) -> list[Unit]:
    """The functions that are tests, each with its parameters."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in measured:
        if "::" in name:
            functions[name.partition("[")[0]].append(name)
    inner = {str(path.relative_to(ROOT)): inner_lines(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    found = []
    for name, tests in functions.items():
        seconds = sum(measured[test][0] for test in tests)
        always = name.partition("::")[0] in ALWAYS
        unit = Unit(name, len(tests), seconds, cheap=seconds < CHEAP or always)
        missed: dict[int, float] = defaultdict(lambda: 1.0)
        for test in tests:
            run = [(path, line) for path, lines in measured[test][1].items() for line in lines]
            run = [(path, line) for path, line in run if line in inner.get(path, ())]
            keen = keenness(len(run))
            for place in run:
                if place in numbers:
                    missed[numbers[place]] *= 1 - keen / math.sqrt(len(tests))  # parameters are much alike
        unit.finds = {number: 1 - chance for number, chance in missed.items()}
        found.append(unit)
    return found


def choose(measured: dict[str, tuple[float, dict[str, list[int]]]], seconds: float) -> tuple[list[Unit], list[Unit]]:
    """The units that find most in the time, by their gain per second, and those left out."""
    weights = chances()
    numbers = {place: number for number, place in enumerate(weights)}
    worth = list(weights.values())
    missed = [1.0] * len(worth)
    imports = {name: taken for name, (taken, _) in measured.items() if "::" not in name}
    every = units(measured, numbers)
    opened: set[str] = set()

    def cost(unit: Unit) -> float:
        return unit.seconds + (0 if unit.module in opened else imports.get(unit.module, 0.1))

    def rate(unit: Unit) -> float:
        gain = sum(worth[number] * missed[number] * chance for number, chance in unit.finds.items())
        return math.inf if unit.cheap else gain / cost(unit)

    queue = [(-rate(unit), index) for index, unit in enumerate(every)]
    heapq.heapify(queue)
    chosen, left, spare = [], [], seconds
    while queue:
        _, index = heapq.heappop(queue)
        unit = every[index]
        current = rate(unit)
        if queue and current < -queue[0][0] * (1 - 1e-9):
            heapq.heappush(queue, (-current, index))
            continue
        price = cost(unit)
        if price > spare or not current:
            left.append(unit)
            continue
        chosen.append(unit)
        spare -= price
        opened.add(unit.module)
        for number, chance in unit.finds.items():
            missed[number] *= 1 - chance
    total = sum(worth)
    reached = sum(weight for weight, chance in zip(worth, missed, strict=True) if chance < 1)
    expected = sum(weight * (1 - chance) for weight, chance in zip(worth, missed, strict=True))
    tests, others = (sum(unit.tests for unit in parts) for parts in (chosen, left))
    print(f"{tests} tests of {tests + others}, {seconds - spare:.0f} s of processor time")
    print(f"run {reached / total:.1%} of the lines that can have a fault, and notice perhaps {expected / total:.1%}")
    return chosen, left


def words(chosen: list[Unit], left: list[Unit], before: list[str]) -> list[str]:
    """The arguments of pytest: folders and files, and what is left out of them.

    Args:
        chosen: units to run.
        left: units to leave out.
        before: the arguments so far; they hold for what was not measured.
    """
    known = {unit.name for unit in (*chosen, *left)}
    opened = {unit.module for unit in chosen}
    closed = {unit.module for unit in left} - opened
    dropped = {unit.name for unit in left if unit.module in opened}
    beside = {word for word in before if not word.startswith(("-", FOLDER))}
    measured = {name.partition("::")[0] for name in known}
    outside = {module for module in (*opened, *ALWAYS) if not module.startswith(FOLDER)} | {
        word for word in beside if not any(f"{module}/".startswith(f"{word}/") for module in measured)
    }
    for word in before:
        option, _, name = word.partition("=")
        if option == "--deselect" and name not in known and name.partition("::")[0] not in closed:
            dropped.add(name)
        if option == "--ignore" and name not in measured:
            closed.add(name)
    dropped = {name for name in dropped if not any(unit.name.startswith(name) for unit in chosen)}
    return [
        FOLDER,
        *sorted(outside),
        "-mnot slow and not torch and not transformers",
        *(f"--ignore={name}" for name in sorted(closed)),
        *(f"--deselect={name}" for name in sorted(dropped)),
    ]


def defined() -> set[str]:
    """The names of test functions that exist; others were measured, and renamed or removed since."""
    texts = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)", text)}


def main() -> None:
    """Measure or choose."""
    parser = argparse.ArgumentParser(description="choose the tests of `make quick`")
    parser.add_argument("step", choices=["measure", "choose"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="processor seconds of the tests")
    parser.add_argument("--write", action="store_true", help="write tests/quick.txt")
    options, rest = parser.parse_known_args()
    if options.step == "measure":
        sys.exit(measure(options.folder, rest))
    names = defined()
    measured = records(options.folder)
    there = {test: taken for test, taken in measured.items() if test.partition("[")[0].rpartition("::")[2] in names}
    modules = {test: taken for test, taken in measured.items() if "::" not in test}
    chosen, left = choose({**modules, **there}, options.seconds)
    if options.write:
        before = QUICK.read_text("utf-8").splitlines()
        QUICK.write_text("".join(f"{word}\n" for word in words(chosen, left, before)), "utf-8")


if __name__ == "__main__":
    main()
