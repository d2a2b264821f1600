"""Models that break in half precision: cast naively, converted by the lists, repaired with data, and half exports.

    python benchmarks/run.py hard_models    # writes results and docs/evidence/hard_models.md

The models are in tests/support/hard_models.py and tests/support/planted_models.py. All low precision is emulated, so
the results do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import amp_rewrite
from amp_rewrite.evidence.verify import Verdict
from benchmarks.shared import measure
from support.hard_models import HARD, Hard, halved
from support.planted_models import OUTLIER, PLANTED, planted

PAGE = measure.ROOT / "docs" / "evidence" / "hard_models.md"
# The relative and absolute tolerance: outputs have magnitude 1. bfloat16 has three bits fewer.
TOLERANCE: Mapping[str, float] = {"float16": 1e-2, "bfloat16": 8e-2}
# The outputs of the exported models have any magnitude: the largest error, relative to the largest output.
SCALED = 1e-2


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one low type. `by_hand`: everything low; `by_lists`: converted without data; `repaired`: with data.

    `high`: the products that stay float32 in the repaired model, out of `products`. `first_jump`: the first op where
    the half export departs from its float32 twin, by `locate`; `raised`: the number of its ops raised by repair.
    """

    model: str
    to: str
    products: int
    by_hand: str
    by_lists: str
    repaired: str
    high: tuple[str, ...]
    regions: tuple[str, ...]
    minimal: bool
    trials: int
    half: str
    first_jump: str
    half_repaired: str
    raised: int
    raised_products: tuple[str, ...]
    half_trials: int


def measured(name: str, to: str) -> Row:
    """Measure one model in one type."""
    hard = HARD[name]()
    tolerance = {"rtol": TOLERANCE[to], "atol": TOLERANCE[to]}
    plain = amp_rewrite.convert(hard.model, to=to).result
    found = amp_rewrite.repair(hard.model, hard.batch, to=to, shift="none", **tolerance)  # type: ignore[arg-type]
    half = halved(hard.model, to, clipped=True)
    half_result = amp_rewrite.repair(half, hard.batch, to=to, shift="none", **tolerance)  # type: ignore[arg-type]
    jump = amp_rewrite.locate(half, half, hard.batch).first_jump
    twin = amp_rewrite.emulate(half, rounding=False, io="float32")
    return Row(
        name,
        to,
        found.converted.report.totals.compute_ops,
        _verdict(hard, hard.model, halved(hard.model, to), tolerance),
        _verdict(hard, hard.model, plain, tolerance),
        _outcome(found.verdict),
        _high(found.converted),
        tuple(region.name for region in found.regions),
        found.minimal,
        len(found.trail),
        _verdict(hard, twin, half, tolerance),
        f"{jump.op} ({jump.kind})" if jump is not None else "",
        _outcome(half_result.verdict),
        len(half_result.converted.report.raised),
        _high(half_result.converted),
        len(half_result.trail),
    )


@dataclass(frozen=True, slots=True)
class Outlier:
    """One exported model in float16, with `product` scaled; `low` of `products` are low. See `Row` for the rest."""

    model: str
    product: str
    by_lists: str
    repaired: str
    high: tuple[str, ...]
    low: int
    products: int
    minimal: bool
    trials: int


def outlier(name: str) -> Outlier:
    """Measure one of the exported models with an outlier."""
    hard = planted(name)
    plain = amp_rewrite.convert(hard.model).result
    verdict = amp_rewrite.verify(hard.model, plain, hard.batch, tolerance=SCALED, emulate=True)
    found = amp_rewrite.repair(hard.model, hard.batch, shift="none", tolerance=SCALED)
    totals = found.converted.report.totals
    return Outlier(
        name,
        hard.product,
        _outcome(verdict),
        _outcome(found.verdict),
        _high(found.converted),
        totals.compute_lowered,
        totals.compute_ops,
        found.minimal,
        len(found.trail),
    )


def _verdict(hard: Hard, reference: object, candidate: object, tolerance: Mapping[str, float]) -> str:
    verdict = amp_rewrite.verify(reference, candidate, hard.batch, emulate=True, **tolerance)  # type: ignore[arg-type]
    return _outcome(verdict)


def _outcome(verdict: Verdict | None) -> str:
    """Return the largest error relative to the tolerance, or the share of outputs that became NaN or infinite."""
    assert verdict is not None
    difference = verdict.worst[0].difference
    if difference.nonfinite[1]:
        return f"{difference.nonfinite[1] / difference.elements:.0%} not finite"
    return f"{'ok' if verdict.ok else 'wrong'}, {difference.score:.3g}"


def _high(converted: amp_rewrite.Converted) -> tuple[str, ...]:
    rows = converted.report.rows
    return tuple(row.name for row in rows if row.color == "allow" and row.dtype == "float32")


# -- the page ----------------------------------------------------------------------------------------


def _low(row: Row, high: Sequence[str]) -> str:
    return _share(row.products - len(high), row.products)


def _share(low: int, products: int) -> str:
    return f"{low} of {products} ({low / products:.0%})"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _converted(rows: Sequence[Row]) -> list[str]:
    head = ("model", "naive", "without data", "with data", "products kept in float32", "low", "pinned", "trials")
    return measure.markdown(
        head,
        (
            (
                row.model,
                row.by_hand,
                row.by_lists,
                row.repaired,
                _names(row.high),
                _low(row, row.high),
                _names(row.regions),
                row.trials,
            )
            for row in rows
        ),
    )


def _exported(rows: Sequence[Row]) -> list[str]:
    head = ("model", "as exported", "first jump in the error", "repaired", "ops raised", "products raised", "low")
    return measure.markdown(
        head,
        (
            (
                row.model,
                row.half,
                f"`{row.first_jump}`" if row.first_jump else "-",
                row.half_repaired,
                row.raised,
                _names(row.raised_products),
                _low(row, row.raised_products),
            )
            for row in rows
        ),
    )


def _planted(rows: Sequence[Outlier]) -> list[str]:
    head = ("model", "without data", "with data", "products kept in float32", "low", "trials")
    return measure.markdown(
        head,
        (
            (row.model, row.by_lists, row.repaired, _names(row.high), _share(row.low, row.products), row.trials)
            for row in rows
        ),
    )


def page(rows: Sequence[Row], outliers: Sequence[Outlier]) -> str:
    """Return the text of docs/evidence/hard_models.md."""
    by_type = {to: [row for row in rows if row.to == to] for to in TOLERANCE}
    about = [f"| `{name}` | {hard.what} | {hard.cause} | {hard.fix} |" for name, hard in ((n, HARD[n]()) for n in HARD)]
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "| model | description | failure | remedy and its source |",
        "| --- | --- | --- | --- |",
        *about,
    ]
    for to, found in by_type.items():
        lines += ["", f"## Conversion to {to}", "", _READING[to], "", *_converted(found)]
    lines += ["", *_HALF.splitlines()]
    for to, found in by_type.items():
        lines += ["", f"Exported in {to}:", "", *_exported(found)]
    lines += ["", *_EXPORTED.splitlines(), "", *_planted(outliers)]
    return "\n".join([*lines, "", *_MORE.splitlines()]) + "\n"


_INTRODUCTION = """\
# Models that break in half precision

This page shows seven small models with the numerical problems of large ones. Each is built from a seed in
[tests/support/hard_models.py](../../tests/support/hard_models.py), with data that triggers the problem; in most of
them, op lists and constants do not reveal the problem. `python benchmarks/run.py hard_models` writes this page. Low
precision is [emulated](../concepts/emulation.md), without a GPU. `tests/suites/models/test_hard_models.py` checks
the results. [Range shifting](../concepts/shift.md), which is on by default, is turned off here (`--set shift=none`)
to test only the guard and the search; it is measured with [its own models](../../benchmarks/results/shift.md)."""

_READING = {
    "float16": """\
*Naive*: every tensor is float16, as with `astype`. *Without data*: `amp-rewrite model.onnx --no-check`. *With data*:
`amp-rewrite model.onnx --data batch.npz --set rtol=1e-2 --set atol=1e-2 --set shift=none` (outputs have magnitude 1;
the outputs of `large_logits` are probabilities). Each number is the largest error divided by the allowed error; 1 or
less is ok. *Pinned* lists the regions that the search kept in float32 in addition to the guard's; each is necessary.
*Trials* counts the conversions that the search tried. For `large_logits`, the tolerance only tests for NaN, because
a softmax of logits near 90,000 is 0 or 1.""",
    "bfloat16": """\
bfloat16 has float32's range but three bits fewer than float16, so the tolerance is eight times as wide: 8e-2. Values
that overflow float16 fit bfloat16, but computations that need precision fail more easily.""",
}

_HALF = """\
## Models exported in half precision

These are the same models with every tensor in the low type and constants clamped to its range, as in an exporter's
half-precision models. `amp-rewrite locate half.onnx half.onnx --data batch.npz` compares such a model with itself in
float32, without rounding; `amp-rewrite half.onnx -o repaired.onnx --data batch.npz --set rtol=1e-2 --set atol=1e-2`
raises the necessary ops to float32. The reference is the float32 version of the exported model, so the numbers do
not include the export's error."""

_EXPORTED = f"""\
## Exported models with an outlier

These are models from [tests/models](../../tests/models), exported by torch with random weights and converted to
float16. In the middle of each, the weights of one product are scaled so that it adds {OUTLIER:,} to a residual stream
([tests/support/planted_models.py](../../tests/support/planted_models.py)). Each number is the largest error divided by
the largest output; 0.01 is allowed (`--metric scaled=1e-2`)."""

_MORE = """\
## Try one

<!-- not run: needs a checkout -->
```console
$ python tests/support/hard_models.py hard        # writes NAME.onnx and NAME.npz for each model
$ python examples/repair.py               # repairs one of them, command by command
```"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = [measured(name, to) for to in TOLERANCE for name in HARD]
    measure.write("hard_models", measure.machine(), rows, [*_converted(rows), "", *_exported(rows)])
    outliers = [outlier(name) for name in PLANTED]
    measure.write("planted_models", measure.machine(), outliers, _planted(outliers))
    PAGE.write_text(page(rows, outliers), encoding="utf-8")


if __name__ == "__main__":
    main()
