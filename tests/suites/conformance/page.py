"""The results of a run, for a terminal and for docs/conformance.md."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

import onnx
import onnxruntime as ort

from amp_rewrite.version import VERSION
from suites.conformance.case import NEWEST_IR, NEWEST_OPSET
from suites.conformance.judge import DEEP_ENOUGH
from suites.conformance.trial import MODES, Outcome
from suites.conformance.worker import Results

HOW = {
    "rounded": "the float32 model's results on inputs rounded to the low type. In these cases, rounding the inputs "
    "moves the result beyond the bound (tan near π/2, Softmax of numbers around 10,000, sums that cancel) or across a "
    "step (quantization, ties)",
    "quantum": "the standard's results, except that integers from a quantizer may be one step away: the rounded scale "
    "can break a tie the other way",
    "statistics": "the standard's by their share of zeros and the mean of the other elements, because they are chosen "
    "at random",
    "float32": "onnxruntime's own float32 results, which differ from the standard's",
}


def score(results: Results) -> str:
    """Format one line per mode."""
    rows = [("mode", "cases", "correct", "correct with --data", "wrong", "converted", "others valid")]
    for mode in MODES:
        counted, others = results.of(mode, counted=True), results.of(mode, counted=False)
        right = [o for o in counted if o.verdict == "right"]
        data = sum(o.verdict == "data" for o in counted)
        changed = sum(o.how != "unchanged" for o in right) + data
        valid = sum(o.fine for o in others)
        wrong = len(counted) - len(right) - data
        numbers = (len(counted), len(right), data, wrong, changed)
        rows.append((mode, *(str(n) for n in numbers), f"{valid} of {len(others)}"))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def page(results: Results) -> str:
    """Format the whole page, deterministically."""
    return "\n\n".join(_sections(results)) + "\n"


def _sections(results: Results) -> Iterator[str]:
    grounds = [results.grounds[case] for case in sorted(results.grounds)]
    states = Counter(ground.state for ground in grounds)
    suites = Counter(ground.case.split("/")[0] for ground in grounds)
    yield "# Conformance"
    yield _text(
        "`make conformance` converts every test model of the ONNX standard that has float32 inputs or outputs, and "
        "writes this page. "
        f"amp-rewrite {VERSION}, onnx {onnx.__version__}, onnxruntime {ort.__version__}."
    )
    yield score(results)
    yield _text(
        "*Correct*: the converted model passes the full checker, loads in onnxruntime at optimization level BASIC "
        "(float16: also ALL), and gives correct results. *Correct with --data*: without data, the result is wrong, "
        "because some float32 values exceed the type's range on the case's own inputs; it is correct if the model is "
        "converted with these inputs (`amp-rewrite MODEL --data INPUTS`). *Converted*: the number of correct models "
        "(with or without data) that the conversion changed. *Without safety*: with `--set safety=none`, which also "
        "lowers ops with values known to exceed the range. *Others valid*: the number of models that convert and pass "
        "the checker, among those that are not counted."
    )
    yield "## Cases"
    yield _text(
        f"The {len(grounds)} models ({', '.join(f'{count} {suite}' for suite, count in sorted(suites.items()))}) are "
        "all of `onnx.backend.test` except `ai.onnx.preview.training`. "
        f"{states['counted']} run in float32 on onnxruntime's CPU provider; only these are counted. "
        f"{sum(g.relabeled for g in grounds if g.state == 'counted')} of them are relabeled as opset {NEWEST_OPSET} "
        f"and IR {NEWEST_IR}, the newest that onnxruntime loads, and they still pass the checker. "
        f"{states['unlabelled']} other models fail it after relabeling, and onnxruntime cannot run {states['refused']}"
        ": these are converted and checked, but not judged."
    )
    yield "## Criteria"
    yield _text(
        "Results are emulated (`amp_rewrite.emulate`), never computed by half-precision CPU kernels: float32 kernels "
        "compute each op, low results are rounded, and graphs are not optimized. Rounding inside CUDA kernels is "
        "ignored, because it is the same for every converter. Inputs and outputs keep their types. Floating-point "
        f"results may differ from the standard's by at most min(1 + √n, {DEEP_ENOUGH:g}) · eps times the "
        "tensor's largest magnitude, where eps is the low type's machine epsilon and n is the number of low ops. "
        "(Rounding to nearest is off by at most eps/2: the two operands of a product contribute eps, each op rounds "
        "its result once, and independent errors add up as in a random walk. Sums are accumulated in float32, so their "
        "length does not count.) Infinities, NaNs, types, shapes, integers, booleans and strings must be equal. An "
        "unchanged model is correct. Results beyond the bound may still be correct by one of these other measures:"
    )
    for how, words in HOW.items():
        yield f"### {how}\n\n" + _text(f"These results are compared with {words}.")
        yield _by_case(o for o in results.outcomes.values() if o.how == how)
    yield from _with_data([o for o in results.outcomes.values() if o.verdict == "data"])
    yield "## Failures"
    yield _by_case((o for o in results.failures), notes=True)
    yield "## Models that onnxruntime cannot run in float32"
    yield _text(", ".join(f"`{g.case}`" for g in grounds if g.state == "refused") or "None.")
    yield f"## Models that fail the checker at opset {NEWEST_OPSET}"
    yield _text(", ".join(f"`{g.case}`" for g in grounds if g.state == "unlabelled") or "None.")


def _with_data(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the section on cases that are right only with data."""
    if outcomes:
        yield "### data\n\n" + _text(
            "These cases are correct only with data: the safety rules are off or cannot foresee the overflow, but a "
            "run on the case's own inputs shows values that the type cannot hold. The light models have constant "
            "weights of 0.02 instead of trained ones, so their activations are larger than any trained model's."
        )
        yield _by_case(outcomes, notes=True)


def _text(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _by_case(outcomes: Iterable[Outcome], *, notes: bool = False) -> str:
    """Format one line per case with its modes."""
    found: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        note = f"{outcome.verdict}: {outcome.note}" if notes else ""
        found.setdefault((outcome.case, " ".join(note.split())), []).append(outcome.mode)
    lines = [
        f"- `{case}`: {_modes(modes)}{f' ({note})' if note else ''}" for (case, note), modes in sorted(found.items())
    ]
    return "\n".join(lines) or "None."


def _modes(modes: Sequence[str]) -> str:
    if len(modes) == len(MODES):
        return "every mode"
    return ", ".join(mode for mode in MODES if mode in modes)
