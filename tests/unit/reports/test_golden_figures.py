"""Figures of results, against digests of what they were: of conversions, differences, and many unusual numbers.

`make golden` runs this file as a program, which writes them as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from amp_rewrite import DType, Report, convert, diff, explain
from amp_rewrite.files.fit import Fit
from amp_rewrite.files.model import Model
from amp_rewrite.reports.measurements import Difference, OutputRow
from amp_rewrite.reports.model_explorer import overlay
from amp_rewrite.reports.page.linked_graphs import changes_figure
from amp_rewrite.reports.page.markup import written
from amp_rewrite.reports.page.outputs import CriterionLine, outputs_figure
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.page.ranges import ranges_figure
from amp_rewrite.reports.page.report_figures import report_figures
from amp_rewrite.reports.rows import NO_ROW, CastRow, Header, PortRow, Row, Totals
from amp_rewrite.reports.sources import report_and_view, report_in
from support.corpus import TEXT_MODELS, exported, text_model
from support.paths import TESTS

FILE = TESTS / "golden" / "figures.json"
TEXT = ("if_in_loop", "scan", "captures", "qdq21", "casts_that_fold", "local_function", "tied_weights", "sequences")
EXPORTED = ("tests/models/if_ts13.onnx", "tests/models/cnn_dynamo18.onnx")


class Numbers(random.Random):
    """Numbers as they occur in results: ordinary ones, and the unusual ones in turn."""

    def one(self, *unusual: float) -> float:
        """Return a magnitude between 1e-8 and 1e5, or one of the unusual numbers."""
        chosen = int(self.random() * 4 * len(unusual)) if unusual else 0
        return unusual[chosen] if unusual and chosen < len(unusual) else 10 ** (13 * self.random() - 8)

    def below(self, end: int) -> int:
        return int(self.random() * end)

    def of(self, *words: str) -> str:
        return words[self.below(len(words))]


def ranges(rng: Numbers, size: int) -> Figure | Sequence[Figure]:
    if size == 0:
        ends = [(1.0, 2.0), (1e-13, 2.0), (1e-11, 2.0), (1.0, 1e13), (1.0, 1e11), (0.0, 0.0)]
        alone = [{"v": Fit(9, 0, high, low)} for low, high in ends]
        return [ranges_figure(fits, to, "data") for fits in ({}, *alone) for to in (DType.FLOAT16, DType.BFLOAT16)]
    pairs = [sorted((rng.one(0.0), rng.one(0.0, 7e4))) for _ in range(size)]
    counts = [[rng.below(3) if rng.below(2) else 0 for _ in range(4)] for _ in range(size)]
    fits = [Fit(20, n[0], high, low, *n[1:]) for (low, high), n in zip(pairs, counts, strict=True)]
    values = {f"v{i}": fit for i, fit in enumerate(fits)}
    return ranges_figure(values, DType.FLOAT16 if size % 2 else DType.BFLOAT16, "2 batches")


def outputs(rng: Numbers, size: int) -> Figure:
    rows = [
        OutputRow(
            f"y{i // 2}",
            i % 2,
            Difference(
                9, rng.below(2) > 0, "off", score=rng.one(0.0, math.inf, math.nan) if rng.below(4) else None,
                scaled=rng.one(0.0, math.inf) if rng.below(4) else None,
            ),
            f"[{i}]" if i % 5 == 0 else "",
        )
        for i in range(size)
    ]  # fmt: skip
    return outputs_figure(rows, CriterionLine("error ≤ 0.01", "error", 0.01, size % 2 > 0), "failed")


def changes(rng: Numbers, size: int) -> Figure:
    types = ("float16", "bfloat16", "float32", "float64", "int64", "")
    kinds = ("lowered", "added", "cast +")
    rows = [{"kind": rng.of(*kinds), "title": f"op{i}", "op": "Add", "types": rng.of(*types), "why": i * "w"}
            for i in range(size)]  # fmt: skip
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in ("lowered", "added")}
    return changes_figure(rows, counts, [("to", "float16", "none")])


class Net:
    """Ops by number, each with its row and the numbers that it reads, and a copy that differs in a few."""

    def __init__(self, rng: Numbers, size: int) -> None:
        self.rng, self.ops = rng, dict[int, tuple[Row, list[int]]]()
        for number in range(size):
            self.ops[10 * number] = self.op(number)

    def op(self, number: int) -> tuple[Row, list[int]]:
        """Return an op that reads some of the last ones, or an input of the model."""
        rng = self.rng
        kind = rng.of("MatMul", "MatMul", "Add", "Mul", "Relu", "Softmax", "Concat", "Identity", "Cast", "Constant")
        arity = {"MatMul": 1, "Add": 2, "Mul": 2, "Concat": 3, "Constant": 0}.get(kind, 1)
        dtype = rng.of("float16", "float16", "float32", "bfloat16", "int64")
        types = (dtype,) * arity if kind != "Cast" else (rng.of("float32", "int64"),)
        near = list(self.ops)[-5:]
        reads = [near[rng.below(len(near))] if near and rng.below(6) else NO_ROW for _ in range(arity)]
        rule = rng.of("allow", "deny", "gray_kept", "kept", "constant_range", "")
        return Row(
            f"block_{number // 6}/{kind}_{number}", kind, dtype, rng.of("", "", "loop/"), rng.below(5) > 0,
            {"T": dtype} if rng.below(3) else {"T": dtype, "U": "float32"}, "gray", rule or None,
            note=rng.of("", "a note"), inputs=types, outputs=(dtype,), key=rng.of(kind, f"{kind} axis=0"),
            via={"0": "float16"} if rng.below(9) == 0 else {}, attributes={"axis": rng.of("0", "1")},
            constants=rng.of("", "", "ab", "cd"),
        ), reads  # fmt: skip

    def changed(self, rng: Numbers) -> Net:
        """Return a copy in which ops are renumbered, gone, new, or of another type."""
        other = Net(rng, 0)
        shift = rng.below(3)
        for number, (row, reads) in self.ops.items():
            change = rng.below(12)
            if change == 0 and reads:
                continue
            if change == 1:
                other.ops[number - 1] = other.op(number)
                reads = [number - 1, *reads[1:]]
            row = row._replace(dtype="float32", rule="deny") if change == 2 else row
            name = f"{row.name}_{shift}" if shift and number > 30 else row.name
            other.ops[number] = row._replace(name=name), [self.near(other, read) for read in reads]
        return other

    @staticmethod
    def near(other: Net, read: int) -> int:
        return read if read in other.ops or read == NO_ROW else max((n for n in other.ops if n < read), default=NO_ROW)

    def report(self) -> Report:
        """Return the report of these ops; the model gives what no op reads, and the last op."""
        places = {number: place for place, number in enumerate(self.ops)} | {NO_ROW: NO_ROW}
        rows = [row._replace(reads=tuple(places[read] for read in reads)) for row, reads in self.ops.values()]
        read = {place for row in rows for place in row.reads}
        ends = [place for place in range(len(rows)) if place not in read or place == len(rows) - 1]
        inner = [place for place, row in enumerate(rows) if row.inputs and row.reads and row.reads[0] == NO_ROW]
        origins = ("inserted", "existing", "folded")
        casts = [
            CastRow(f"v{place}", "float32", row.dtype, origins[place % 3], "why", row.scope, 1, 4 * place, place, 0,
                    place % 7 == 0)
            for place, row in enumerate(rows) if place % 4 == 1
        ]  # fmt: skip
        return Report(
            Header("net", 8, {"ai.onnx": 17}, "", "float16", {"level": "default"}), Totals(len(rows), len(rows)),
            tuple(rows), tuple(casts),
            inputs=(PortRow("x", "float32", reads=tuple(number for place in inner for number in (place, 0))),),
            outputs=tuple(PortRow(f"y{place}", rows[place].dtype, place) for place in ends),
        )  # fmt: skip


def differences(rng: Numbers, size: int) -> Sequence[Figure | str]:
    net = Net(rng, min(size, 60))
    shown = list[Figure | str]()
    for _ in range(4):
        a, b = net.report(), net.changed(rng).report()
        delta = diff(a, b)
        shown += delta.figures()
        shown += [delta.to(form, ["lowered"]) for form in ("text", "json", "markdown", "github")]
        shown += [delta.text(verbose=False), b.text(verbose=True)]
    return shown


Made = Callable[[Numbers, int], Figure | Sequence[Figure | str]]
MADE: tuple[Made, ...] = (ranges, outputs, changes, differences)
SIZES = (0, 1, 2, 5, 14, 25, 60, 600)


def figures_of_numbers(made: Made) -> Iterator[tuple[str, Figure | str]]:
    for size in SIZES:
        drawn = made(Numbers(size), size)
        for number, figure in enumerate((drawn,) if isinstance(drawn, Figure) else drawn):
            yield f"{size}.{number}", figure


def figures_of_model(name: str) -> Iterator[tuple[str, Figure | str]]:
    model = exported(name) if name in EXPORTED else text_model(name)
    converted = convert(model)
    low, (as_it_is, view) = _unversioned(converted.report), report_and_view(converted.model)
    errors = {place: (0.0, 0.2, math.inf)[place % 3] for place in range(len(as_it_is.rows))}
    parts = {
        "report": report_figures(low),
        "report with its model": report_figures(_unversioned(as_it_is), view, errors),
        "difference": diff(model, converted.model).figures(),
        "difference from bfloat16": diff(converted.model, convert(model, to="bfloat16").model).figures(),
    }
    for part, figures in parts.items():
        for figure in figures:
            yield f"{figure.name} of {part}", figure


def texts_of_models() -> Iterator[tuple[str, str]]:
    """Reports, inventories, reasons and overlays of all text models, in the form that each is printed in."""
    for name in TEXT_MODELS:
        converted = convert(text_model(name))
        low = _unversioned(converted.report)
        rules = overlay(Model.load(converted.model), "rule", report=low) if any(row.rule for row in low.rows) else ""
        parts = {
            "report": low.to_json() + low.text(verbose=True),
            "inventory": _unversioned(report_in(text_model(name))).to_json(),
            "reasons": explain(low, *(f"#{place}" for place in range(len(low.rows)))).text(),
            "types": overlay(Model.load(text_model(name))) + rules,
        }
        yield from ((f"{part} of {name}", text) for part, text in parts.items())


def _unversioned(report: Report) -> Report:
    return replace(report, model=replace(report.model, tool=""))


def digest(figure: Figure | str) -> str:
    if isinstance(figure, Figure):
        shown = (figure.name, figure.title, figure.lead, figure.notebook, json.dumps(figure.data))
        return digest("\n".join(map(str, (*shown, written(figure.drawing)))))
    return hashlib.sha256(figure.encode()).hexdigest()[:12]


def digests(figures: Iterator[tuple[str, Figure | str]]) -> dict[str, str]:
    return {name: digest(figure) for name, figure in figures}


def every() -> dict[str, Any]:
    of_numbers = {made.__name__: digests(figures_of_numbers(made)) for made in MADE}
    of_numbers["texts"] = digests(texts_of_models())
    of_models = {name: digests(figures_of_model(name)) for name in (*TEXT, *EXPORTED)}
    return {"onnx": metadata.version("onnx")} | of_numbers | of_models


STORED: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {"onnx": ""}


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_figures_of_unusual_numbers_are_what_they_were(made: Made) -> None:
    assert digests(figures_of_numbers(made)) == STORED[made.__name__]


@pytest.mark.skipif(metadata.version("onnx") != STORED["onnx"], reason=f"digests are those under onnx {STORED['onnx']}")
@pytest.mark.parametrize("name", [*TEXT, *EXPORTED])
def test_figures_of_models_are_what_they_were(name: str) -> None:
    assert digests(figures_of_model(name)) == STORED[name]


@pytest.mark.skipif(metadata.version("onnx") != STORED["onnx"], reason=f"digests are those under onnx {STORED['onnx']}")
def test_texts_of_models_are_what_they_were() -> None:
    assert digests(texts_of_models()) == STORED["texts"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(every(), indent=1) + "\n", "utf-8")
