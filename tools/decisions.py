"""Dump the decisions of conversions for a set of models, and compare two dumps.

    python tools/decisions.py dump DUMP.json.xz [--group exports …] [--also NAME=FOLDER …] [--jobs 2]
    python tools/decisions.py compare BEFORE.json.xz AFTER.json.xz [--mode plain …] [--to float16] [--models PATTERN]

A dump contains, for each model, type and mode, all ops with their floating variables, types and reasons, and all Casts.
The groups are the shipped exports, the hit and near models of the rules, the catalogue of failures and the models of
the harm suite. `--also` adds the .onnx files below a folder, without duplicates. Dumps only use conversion reports, so
you can compare dumps of different versions.

For each model and in total, `compare` prints how many variables are low in only one dump, the number of new Casts, and
the number of net Casts (new minus removed). With `-v`, it lists each variable and each changed reason. It does not
count the variables of Constants and Casts, since they follow their contents and inputs. The exit code is 1 if there is
a difference.

tests/data/decisions.json.xz is the reference dump. It has all groups, small models of known faults as `cases`, and
trained models from packages on PyPI and npm as `released`.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from amp_rewrite import AmpRewriteError, convert  # noqa: E402  from the checkout, not an installed one
from amp_rewrite.version import VERSION  # noqa: E402

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "own_opset": {"opset": "keep"},
    "plain": {"opset": "keep", "fuse": "none"},
    "tensorflow": {"opset": "keep", "fuse": "none", "safety": "none", "shift": "none"},
}
"""The options of each mode. Each mode after the default turns off more than the one before."""
TYPES = ("float16", "bfloat16")
LOW = frozenset(TYPES)


# -- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model of a group. `model`: a function for the model or its path. `options`: its additional options."""

    name: str
    model: Callable[[], ModelProto | bytes | Path]
    options: Mapping[str, Any]


def exports() -> Iterator[Source]:
    """Yield the exported models of tests and examples."""
    for path in (*sorted(ROOT.glob("tests/models/*.onnx")), *sorted(ROOT.glob("examples/**/*.onnx"))):
        yield Source(path.relative_to(ROOT).with_suffix("").as_posix(), partial(Path, path), {})


def rules() -> Iterator[Source]:
    """Yield the hit and near models of each safety rule: the smallest that needs it, the closest without need."""
    from amp_rewrite.decide.reasons import RULES

    for rule in RULES:
        options = {"target": rule.target} if rule.target else {}
        for case in rule.pairs:
            for end in ("hit", "near"):
                yield Source(f"{case}.{end}", partial(_parsed, rule.model(end, case)), options)


def catalogue() -> Iterator[Source]:
    """Yield the models of the catalogue of failures."""
    from suites.catalogue import case as cases

    for path in sorted(Path(cases.__file__).parent.glob("*.onnxtxt")):
        for case in cases.table(path.stem):
            yield Source(f"{path.stem}/{case.name}", case.model, _options(case))


def harm() -> Iterator[Source]:
    """Yield the models of the harm suite, with static or dynamic shapes."""
    from suites.harm.case import CASES

    for case in CASES:
        if case.to.spelling == case.types[0]:
            shapes = "free" if case.free else "static"
            yield Source(f"{case.principle}/{case.name}, {shapes}", case.model, dict(case.options))


GROUPS: Mapping[str, Callable[[], Iterator[Source]]] = {
    "exports": exports,
    "rules": rules,
    "catalogue": catalogue,
    "harm": harm,
}


def below(folder: Path) -> Iterator[Source]:
    """Yield the models below a folder, without duplicates."""
    seen = set()
    for path in sorted(folder.rglob("*.onnx")):
        digest = hashlib.sha256(path.read_bytes()).digest()
        if digest not in seen:
            seen.add(digest)
            yield Source(path.relative_to(folder).with_suffix("").as_posix(), partial(Path, path), {})


def _parsed(text: str) -> ModelProto:
    import onnx.parser

    return onnx.parser.parse_model(text)


def _options(case: Any) -> dict[str, Any]:
    """Return the options of a case, without the type."""
    return {name: value for name, value in case.options.items() if name != "to"}


# -- dumps -----------------------------------------------------------------------------------------


def decided(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ops and Casts of a conversion, or the error."""
    try:
        report = convert(model, **options).report
    except AmpRewriteError as error:
        return {"refused": str(error).partition("; ")[0]}
    ops = [[row.path, row.op, dict(row.variables), row.rule or "", row.because or ""] for row in report.rows]
    casts = [[cast.value, cast.from_, cast.to, cast.origin] for cast in report.casts]
    return {"ops": ops, "casts": casts}


def dumped(source: Source) -> dict[str, Any]:
    """Return a model's decisions by type and mode, with a digest of the model."""
    model = source.model()
    content = model.read_bytes() if isinstance(model, Path) else model.SerializeToString(deterministic=True)
    entry: dict[str, Any] = {"sha256": hashlib.sha256(content).hexdigest()[:16]}
    for to in TYPES:
        entry[to] = {mode: decided(model, {**source.options, **options, "to": to}) for mode, options in MODES.items()}
    return entry


def dump(path: Path, groups: Sequence[str], also: Sequence[str], jobs: int) -> None:
    """Write the decisions for the models of groups and folders."""
    tables = {name: GROUPS[name] for name in groups}
    for word in also:
        name, _, folder = word.partition("=")
        tables[name] = partial(below, Path(folder))
    with ProcessPoolExecutor(jobs) as pool:
        results = {
            f"{group}/{source.name}": pool.submit(dumped, source) for group, of in tables.items() for source in of()
        }
        models = {}
        for at, (name, entry) in enumerate(results.items(), 1):
            models[name] = entry.result()
            if at % 20 == 0:
                print(f"{at} of {len(results)}", file=sys.stderr)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in models.items())
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        file.write(f'{{"version": {json.dumps(VERSION)}, "models": {{\n{lines}\n}}}}\n')


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """The decisions of a conversion in a dump."""

    ops: Sequence[tuple[str, str, Mapping[str, str], str, str]]
    casts: Sequence[tuple[str, str, str, str]]
    refused: str = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Decisions:
        return cls(entry.get("ops", ()), entry.get("casts", ()), entry.get("refused", ""))

    @property
    def variables(self) -> dict[tuple[str, str], str]:
        """The types of the compared variables, by op and name."""
        counted = ((path, types) for path, op, types, _, _ in self.ops if op not in ("Cast", "Constant"))
        return {(path, name): dtype for path, types in counted for name, dtype in types.items()}

    @property
    def low(self) -> set[tuple[str, str]]:
        return {variable for variable, dtype in self.variables.items() if dtype in LOW}

    @property
    def reasons(self) -> dict[str, str]:
        return {path: f"{rule} because of {because}" if because else rule for path, _, _, rule, because in self.ops}

    @property
    def inserted(self) -> int:
        return sum(origin == "inserted" for *_, origin in self.casts)

    @property
    def net(self) -> int:
        return self.inserted - sum(origin == "folded" for *_, origin in self.casts)


def differences(before: Decisions, after: Decisions) -> Iterator[str]:
    """Yield a line for each different variable, Cast and reason in two conversions."""
    if before.refused != after.refused:
        yield f"refused: {before.refused or 'not before'} → {after.refused or 'not after'}"
    types, new_types = before.variables, after.variables
    for key in sorted(types.keys() | new_types.keys()):
        if types.get(key) != new_types.get(key):
            reason, new_reason = before.reasons.get(key[0], "no such op"), after.reasons.get(key[0], "no such op")
            yield (f"{key[0]} {key[1]}: {types.get(key, '–')} ({reason}) → {new_types.get(key, '–')} ({new_reason})")
    changed = Counter(map(tuple, after.casts))
    changed.subtract(Counter(map(tuple, before.casts)))
    for (value, source, to, origin), count in sorted(changed.items()):
        if count:
            yield f"Cast of {value}, {source} → {to}, {origin}: {count:+d}"
    for path, reason in after.reasons.items():
        same = all(types.get(key) == new_types.get(key) for key in new_types if key[0] == path)
        if same and path in before.reasons and before.reasons[path] != reason:
            yield f"{path}: {before.reasons[path]} → {reason}"


def compare(before: Path, after: Path, modes: Sequence[str], types: Sequence[str], pattern: str, verbose: bool) -> bool:
    """Print the differences between two dumps; return True if there are any."""
    dumps = [_read(path) for path in (before, after)]
    names = [name for name in dumps[0] if name in dumps[1] and fnmatch.fnmatch(name, pattern)]
    for name in sorted(dumps[0].keys() ^ dumps[1].keys()):
        if fnmatch.fnmatch(name, pattern):
            print(f"in one dump only: {name}")
    different = False
    for to in types:
        for mode in modes:
            print(f"\n{to}, {mode}: low before → after (lost, gained), net Casts, new Casts")
            sums = [0] * 8
            for name in names:
                if dumps[0][name]["sha256"] != dumps[1][name]["sha256"]:
                    print(f"  {name}: not the same model")
                    continue
                old, new = (Decisions.of(d[name][to][mode]) for d in dumps)
                row = [len(old.low), len(new.low), len(old.low - new.low), len(new.low - old.low)]
                row += [old.net, new.net, old.inserted, new.inserted]
                sums = [a + b for a, b in zip(sums, row, strict=True)]
                lines = list(differences(old, new))
                different |= bool(lines)
                if row[2] or row[3] or row[4] != row[5] or row[6] != row[7] or old.refused != new.refused:
                    print(f"  {name}: {_row(row)}")
                if verbose and lines:
                    print(*(f"    {name}: {line}" for line in lines), sep="\n")
            print(f"  all {len(names)}: {_row(sums)}")
    return different


def _row(row: Sequence[int]) -> str:
    return "{} → {} (−{}, +{}), {} → {}, {} → {}".format(*row)


def _read(path: Path) -> dict[str, Any]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        models: dict[str, Any] = json.load(file)["models"]
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dump")
    command.add_argument("path", type=Path)
    command.add_argument("--group", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    command.add_argument("--also", nargs="*", default=[], metavar="NAME=FOLDER")
    command.add_argument("--jobs", type=int, default=2)
    command = commands.add_parser("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.add_argument("--mode", nargs="*", default=list(MODES), choices=list(MODES))
    command.add_argument("--to", nargs="*", default=list(TYPES), choices=list(TYPES))
    command.add_argument("--models", default="*", help="glob pattern for names, such as 'exports/*'")
    command.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    if options.command == "dump":
        dump(options.path, options.group, options.also, options.jobs)
    else:
        parts = options.before, options.after, options.mode, options.to, options.models, options.verbose
        raise SystemExit(compare(*parts))


if __name__ == "__main__":
    main()
