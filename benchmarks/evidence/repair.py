"""Cost of the search for ops that need float32, compared with another tool.

    python benchmarks/run.py repair                                        # eight rows
    python benchmarks/run.py repair CACHE [--peers PEERS/bin/python] [--limit SECONDS]

The eight rows need nothing else: four models of tests/models, at two tolerances. Each run is a separate process. CPU
seconds are the median of three runs, including imports.

With CACHE, the model is BERT-base with random weights, exported with torch and transformers (see shared/zoo.py). In
three of its twelve layers, the attention values are scaled by 2^18, and the weights after them undo the scaling. In
float32 this is the same function to the last bits; in float16, the values overflow and the weights vanish. `--peers` is
a separate environment with onnxconverter-common and onnxruntime. That tool gets the same model, batch and tolerance,
and is stopped after `--limit` seconds. Results are verified by emulation, with a GPU's rounding. Rows not measured in
this run keep their numbers and their date.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared import measure

RTOL, ATOL = 1e-2, 3e-2
"""|a - b| <= ATOL + RTOL |a|: three times the float16 error of the unmodified model (0.0104 at most)."""

SCALE, LAYERS = 2.0**18, (2, 6, 10)

MODELS, TOLERANCES = ("bert_dynamo20", "vit_dynamo22", "t5_dynamo18", "llama_dynamo21"), (1e-3, 3e-4)
ROUNDS = 3
OWN, PEER = "amp-rewrite", "onnxconverter-common auto_mixed_precision"


@dataclass(frozen=True, slots=True)
class Row:
    """One tool: its cost, its number of tries and its result."""

    tool: str
    seconds: float
    processor: float
    peak: int
    stopped: bool
    tries: int
    float32: int
    low: int
    verdict: str
    date: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One repair: CPU seconds, trials, float32 ops, and the largest error relative to its output."""

    model: str
    tolerance: float
    processor: float
    trials: int
    float32: int
    error: float


def repaired(name: str, tolerance: float) -> Outcome:
    """Repair a stored model in this process, which must be fresh."""
    import amp_rewrite
    from suites.models.test_fixtures import batch, source

    data = batch(name, "input")
    start = time.process_time()
    result = amp_rewrite.repair(source(name), data, tolerance=tolerance)
    seconds = time.process_time() - start
    if not result.solved or result.verdict.score is None or result.report.evidence is None:
        raise SystemExit(f"{name} was not repaired to {tolerance:g}: {result.verdict}")
    error = result.report.evidence.largest_error
    error = math.nan if error is None else error
    return Outcome(name, tolerance, seconds, len(result.trail), result.converted.coloring.float32_ops, error)


def outcome(name: str, tolerance: float) -> Outcome:
    """Repair a stored model in several processes."""
    runs = [measure.apart(repaired, name, tolerance) for _ in range(ROUNDS)]
    return replace(runs[0], processor=statistics.median(run.processor for run in runs))


def planted(cache: str) -> str:
    """Export BERT-base and scale its attention; its batch is that of bert_base."""
    import numpy as np
    import onnx

    from benchmarks.shared import zoo

    source = zoo.export("bert_base", Path(cache), zoo.bert)
    target = Path(cache) / "bert_base_scaled.onnx"
    if not target.exists():
        model = onnx.load(source)
        weights = {tensor.name: tensor for tensor in model.graph.initializer}
        softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
        for layer in LAYERS:
            for name, factor in zip(
                _around(model.graph.node, softmaxes[layer], weights), (SCALE, 1 / SCALE), strict=True
            ):
                scaled = onnx.numpy_helper.to_array(weights[name]) * np.float32(factor)
                weights[name].CopyFrom(onnx.numpy_helper.from_array(scaled, name))
        onnx.save(model, target)
    return str(target)


def _around(nodes: Any, softmax: Any, weights: Any) -> tuple[str, str]:
    """Return the names of an attention's value weights and output weights."""
    makers = {name: node for node in nodes for name in node.output}
    readers = {name: node for node in nodes for name in node.input}
    product = readers[softmax.output[0]]
    while product.op_type != "MatMul":
        product = readers[product.output[0]]
    before, after = makers[product.input[1]], readers[product.output[0]]
    while before.op_type != "MatMul":
        before = makers[next(name for name in before.input if name in makers)]
    while after.op_type != "MatMul":
        after = readers[after.output[0]]
    return before.input[1], after.input[1]


def peer(source: str, batch: str, target: str) -> None:
    """Run onnxconverter-common's search, in its own environment; it prints each attempt."""
    import numpy as np
    import onnx
    from onnxconverter_common import auto_mixed_precision  # type: ignore[import-not-found]

    with np.load(batch) as stored:
        feed = {name: stored[name] for name in stored.files}
    model = auto_mixed_precision.auto_convert_mixed_precision(
        onnx.load(source), feed, rtol=RTOL, atol=ATOL, keep_io_types=True
    )
    onnx.save(model, target)


def judged(source: str, batch: str, target: str) -> tuple[int, int, str]:
    """Count a result's float32 and low ops, and judge it with every rounding emulated."""
    from amp_rewrite.evidence.verify import verify
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.report_builder import report_of

    rows = [r for r in report_of(View.of(Model.load(target))).rows if r.op not in ("Cast", "Constant")]
    verdict = verify(source, target, batch, rtol=RTOL, atol=ATOL, emulate=True)
    (worst,) = verdict.worst
    summary = f"{'ok' if verdict.ok else 'not ok'}, largest error {worst.difference.max_abs:.3g}"
    return sum(r.dtype == "float32" for r in rows), sum(r.dtype == "float16" for r in rows), summary


def measured(tool: str, command: list[str | Path], output: Path, source: str, batch: str, target: Path) -> Row:
    """Run one tool, and judge its result."""
    cost = measure.cost(command, stdout=output)
    stopped = cost.code == 124
    if cost.code not in (0, 124):
        raise SystemExit(f"{tool} failed: {cost.said}")
    found: tuple[int, int, str] = (0, 0, "no result") if stopped else measure.apart(judged, source, batch, str(target))
    today = str(measure.machine()["date"])
    return Row(tool, cost.wall, cost.cpu, cost.peak, stopped, _tries(tool, output.read_text("utf-8")), *found, today)


def _tries(tool: str, output: str) -> int:
    """Return the number of candidates tried, from the tool's own output."""
    if tool == OWN:
        findings = [f for f in json.loads(output)["findings"] if f["kind"] == "repaired"]
        if not findings:  # the first conversion passes
            return 1
        return int(re.search(r"(\d+) trial", findings[0]["message"])[1])  # type: ignore[index]
    return len(re.findall(r"^Running attempt", output, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("--peers", type=Path, help="the Python of the other tool's environment")
    parser.add_argument("--limit", type=int, default=1800)
    args = parser.parse_args()
    measure.warm_up()
    stored = json.loads((measure.RESULTS / "repair.json").read_text("utf-8"))["rows"]
    tools = {row["tool"]: Row(**row) for row in stored if "tool" in row}
    outcomes = [Outcome(**row) for row in stored if "tool" not in row]
    if args.cache is None:
        outcomes = [outcome(name, tolerance) for name in MODELS for tolerance in TOLERANCES]
    else:
        source = measure.apart(planted, str(args.cache))
        batch = str(args.cache / "bert_base.npz")
        for tool in (OWN, PEER) if args.peers else (OWN,):
            target = args.cache / "repaired.onnx"
            target.unlink(missing_ok=True)
            command = _command(tool, args, source, batch, target)
            tools[tool] = measured(tool, command, args.cache / "output.txt", source, batch, target)
            print(tools[tool], file=sys.stderr)
    rows = [tools[tool] for tool in (OWN, PEER)]
    measure.write("repair", measure.machine(), [*rows, *outcomes], [*_table(rows), "", *_repairs(outcomes)])


def _command(tool: str, args: Any, source: str, batch: str, target: Path) -> list[str | Path]:
    limited: list[str | Path] = ["timeout", str(args.limit)]
    if tool != OWN:
        return [*limited, *measure.script("repair", args.peers), "--peer", source, batch, target]
    tolerance = ("--set", f"rtol={RTOL}", "--set", f"atol={ATOL}")
    return [*limited, *measure.own_command(), source, "-o", target, "--data", batch, *tolerance, "--json"]


def _table(rows: list[Row]) -> list[str]:
    head = ("tool", "date", "seconds", "CPU s", "peak MB", "tries", "ops float32 / float16", "result, emulated")
    cells = [
        (
            row.tool,
            row.date,
            f"{'> ' if row.stopped else ''}{row.seconds:.0f}",
            f"{row.processor:.0f}",
            f"{row.peak / 1e6:.0f}",
            row.tries,
            "-" if row.stopped else f"{row.float32} / {row.low}",
            row.verdict,
        )
        for row in rows
    ]
    return ["BERT-base with scaled attention:", "", *measure.markdown(head, cells)]


def _repairs(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of the stored models."""
    head = ("model", "tolerance", "trials", "float32 ops", "CPU s", "largest error")
    cells = [
        (o.model, f"{o.tolerance:g}", o.trials, o.float32, f"{o.processor:.2f}", f"{o.error:.2g}") for o in outcomes
    ]
    ops, seconds = (sum(getattr(row, name) for row in outcomes) for name in ("float32", "processor"))
    total = f"In total, {ops} float32 ops in {seconds:.1f} CPU seconds."
    return ["Exported models:", "", *measure.markdown(head, cells), "", total]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
    else:
        main()
