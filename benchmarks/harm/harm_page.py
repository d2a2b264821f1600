"""Write the page about harm, docs/evidence/harm.md, from the rows of `harm`.

    python benchmarks/run.py harm_page NAME=FOLDER …    # add the folders' rows to results/harm.json, and write the page
    python benchmarks/run.py harm_page                  # write the page from results/harm.json

NAME is a group of GROUPS. A new row replaces the old row of its model, so you can measure groups in pieces, at
different times and commits; the page lists the commits. Every increase of Casts or bytes over the other version, and
every decrease of the low share of operations, needs a reason in `reasons.yaml`; without one, the page shows "unknown".
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harm.harm import BEFORE, COMPARED, Judged, compared
from benchmarks.shared import measure

PAGE = measure.ROOT / "docs" / "evidence" / "harm.md"
RESULTS = measure.RESULTS / "harm.json"
REASONS = Path(__file__).with_name("reasons.yaml")
GROUPS: Mapping[str, str] = {
    "real": "Two layers at real widths and lengths",
    "zoo": "Whole models of real size",
    "shipped": "Shipped models",
    "small": "Small models of architectures",
}
TYPES = ("float16", "bfloat16")
MORE_BYTES = 0.01
"""The relative increase in bytes allowed without a reason."""
INTRO = """# Accuracy of conversions, compared with rounding only the products

`benchmarks/run.py harm FOLDER --before CHECKOUT` produced the results below. *Before* is commit 1f32681, which predates
the rules that prevent harm. Reference *A* rounds the inputs of products; reference *B* also rounds their results, as
PyTorch's autocast does. The error is the largest over all outputs, relative to the output's largest magnitude. Low
precision is emulated on a CPU, and integers must be equal. The tolerance is 2e-2 for float16 and 1.6e-1 for bfloat16.
Casts are counted in the file and, in parentheses, after onnxruntime {onnxruntime} has optimized it for CUDA. Bytes are
the bytes that all ops read and write, according to the cost model, with assumed sizes for free dimensions.

A conversion *harms* a model if its error exceeds the tolerance, but the error of rounding only the products does not:

- *right*: the error is within the tolerance.
- *harmed*: the error exceeds the tolerance, but reference B's does not.
- *only A right*: the errors of the conversion and of B exceed the tolerance, but A's does not.
- *undecided*: a reference is right, but only by chance: with random errors of the size of rounding errors, reference B
  is wrong in at least 2 of 8 perturbations.
- *wrong in all*, or "wrong, like both references": all three errors exceed the tolerance.

Weights are random, from a fixed seed. In small models, they have the magnitude of trained weights; at real widths, they
also have the spread of trained weights (rows differ in magnitude, and 1 in 256 channels of a norm has 8 times the
gain). If an export has a second batch, with a fully masked row, the tables show the larger error.
"""
WIDTHS = ("model", "parameters", "inputs")


def merged(pairs: Sequence[str], kept: dict[str, Any]) -> dict[str, Any]:
    """Add the rows and exports of folders, written as NAME=FOLDER, to the results.

    New and changed rows record the last commit that changed the package.
    """
    command = ["git", "log", "-1", "--format=%h", "--", "amp_rewrite"]
    commit = subprocess.run(command, cwd=measure.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    groups = kept.setdefault("groups", {})
    for pair in pairs:
        name, _, folder = pair.partition("=")
        group = groups.setdefault(name, {"exports": {}, **{to: {} for to in TYPES}})
        for path in sorted(Path(folder).glob("*.json")):
            export = json.loads(path.read_text("utf-8"))
            if "architecture" in export:
                group["exports"][export["architecture"]] = export
        for to in TYPES:
            for path in sorted(Path(folder).glob(f"rows/*.{to}.json")):
                row = json.loads(path.read_text("utf-8"))
                old = group[to].get(row["model"], {})
                same = {**old, "commit": None} == {**row, "commit": None}
                group[to][row["model"]] = old if same else {**row, "commit": commit}
            group[to] = dict(sorted(group[to].items()))
        group["exports"] = dict(sorted(group["exports"].items()))
    return kept


def judged(group: Mapping[str, Any], to: str) -> list[Judged]:
    """Return the rows of a group in a type."""
    return [Judged.of({k: v for k, v in row.items() if k != "commit"}) for row in group[to].values()]


def changes(row: Judged) -> Iterator[str]:
    """Yield the increases over the other version, and the decrease of low operations."""
    if row.size is None or row.before is None:
        return
    new, old = row.size, row.before
    if new.casts > old.casts:
        yield f"{old.casts} → {new.casts} Casts"
    if new.on_cuda is not None and old.on_cuda is not None and (new.on_cuda > old.on_cuda or new.casts > old.casts):
        yield f"{old.on_cuda} → {new.on_cuda} on CUDA"
    if new.bytes > old.bytes * (1 + MORE_BYTES):
        yield f"bytes {new.bytes / old.bytes - 1:+.0%}"
    if new.operations < old.operations - 0.005:
        yield f"low operations {old.operations:.0%} → {new.operations:.0%}"


def reason(row: Judged, to: str, reasons: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason of a model's changes; "unknown" without one."""
    for one in reasons:
        if to in one.get("to", TYPES) and any(fnmatch.fnmatch(row.model, glob) for glob in one["models"]):
            return str(one["reason"])
    return "unknown"


def rises(groups: Mapping[str, Any], reasons: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each model with an increase: the change, errors before and after, and the reason."""
    for group in groups.values():
        for to in TYPES:
            for row in judged(group, to):
                if change := ", ".join(changes(row)):
                    errors = " → ".join(f"{row.shown(way):.1e}" for way in (BEFORE, "ours"))
                    yield row.model, to, change, errors, reason(row, to, reasons)


def wrong(groups: Mapping[str, Any], word: str, reasons: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the errors and the reason of each model with a judgement starting with `word`."""
    for group in groups.values():
        for to in TYPES:
            for row in judged(group, to):
                if row.fault or not row.judgement.startswith(word):
                    continue
                errors = (f"{row.shown(way):.1e}" for way in ("ours", "A", "B"))
                yield row.model, to, *errors, reason(row, to, reasons)


def counts(groups: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each group and type: the numbers of models by judgement, and of faults."""
    for name, group in groups.items():
        for to in TYPES:
            found = judged(group, to)
            words = [row.judgement for row in found if not row.fault]
            harmed = sum(word.startswith("harmed: B") for word in words)
            only_a = sum(word == "harmed: A right" for word in words)
            chance = sum(word.startswith("undecided") for word in words)
            numbers = (
                len(words),
                words.count("right"),
                harmed,
                only_a,
                chance,
                words.count("wrong, like both references"),
            )
            yield GROUPS[name], to, *numbers, len(found) - len(words)


def failed_exports(group: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each failed export: architecture, exporter, and its error."""
    for name, export in group["exports"].items():
        for exporter in ("dynamo", "torchscript"):
            word = export.get(exporter, "")
            if word and word not in ("dynamic", "fixed"):
                yield name, exporter, _plain(word)
        if "fault" in export:
            yield name, "–", _plain(export["fault"])


def faults(group: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each unmeasured model, with the error."""
    found = {row.model: row.fault for to in TYPES for row in judged(group, to) if row.fault}
    yield from ((model, _plain(why)) for model, why in found.items())


def _plain(export: str) -> str:
    """Shorten an error to fit into a table."""
    words = " ".join("".join(c if c.isprintable() else " " for c in export).split())
    return textwrap.shorten(words.replace("|", "/").replace("[96m", "").replace("[0m", ""), 140)


def widths(group: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each model, with its parameters and the shapes of its inputs."""
    for row in judged(group, TYPES[0]):
        if row.inputs:
            inputs = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in row.inputs.items())
            yield row.model, f"{row.parameters / 1e6:.1f} M", textwrap.shorten(inputs, 160)


def page(results: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    groups = {name: results["groups"][name] for name in GROUPS if name in results["groups"]}
    reasons = yaml.safe_load(REASONS.read_text("utf-8"))
    commits = sorted({row["commit"] for group in groups.values() for to in TYPES for row in group[to].values()})
    head = ("group", "type", "models", "right", "harmed", "only A right", "undecided", "wrong in all", "not measured")
    lines = [INTRO.format(onnxruntime=results["machine"]["versions"]["onnxruntime-gpu"])]
    lines += [f"These commits were measured: {', '.join(commits)}.", "", *measure.markdown(head, counts(groups)), ""]
    for title, word in (("Harmed", "harmed: B"), ("Only A is right", "harmed: A")):
        if found := list(wrong(groups, word, reasons)):
            columns = ("model", "type", "ours", "A", "B", "rounded value")
            lines += [f"## {title}", "", *measure.markdown(columns, found), ""]
    lines += ["## Increases and their reasons", ""]
    lines += [*measure.markdown(("model", "type", "change", "error", "reason"), rises(groups, reasons)), ""]
    tried = sum(
        exporter in export
        for group in groups.values()
        for export in group["exports"].values()
        for exporter in _EXPORTERS
    )
    failed = [row for group in groups.values() for row in failed_exports(group)]
    lines += ["## Failed exports", "", f"{len(failed)} of {tried} exports failed with these errors.", ""]
    lines += [*measure.markdown(("architecture", "exporter", "error"), failed), ""]
    if broken := [row for group in groups.values() for row in faults(group)]:
        lines += ["## Unmeasured models", ""]
        lines += [*measure.markdown(("model", "error"), broken), ""]
    for name, group in groups.items():
        lines += [f"## {GROUPS[name]}", ""]
        if name in ("real", "zoo"):
            lines += [*measure.markdown(WIDTHS, widths(group)), ""]
        for to in TYPES:
            lines += [f"### {GROUPS[name]}, {to}", ""]
            rows = (compared(row) for row in judged(group, to) if not row.fault)
            lines += [*measure.markdown(COMPARED, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


_EXPORTERS = ("dynamo", "torchscript")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="NAME=FOLDER")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if args.folders:
        results = {**merged(args.folders, results), "machine": measure.machine(("onnx", "onnxruntime-gpu", "torch"))}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
