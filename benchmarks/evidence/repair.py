"""Cost of a search for the ops that need float32: repair beside another tool, on BERT-base.

    python benchmarks/run.py repair CACHE --peers PEERS/bin/python [--limit SECONDS]

Needs torch and transformers for the export (see shared/zoo.py), and in an environment of their own (`--peers`)
onnxconverter-common and onnxruntime. The model is BERT-base with random weights in which three of the twelve layers
scale the values of their attention by 2^18 and take that back in the weights behind it: in float32 the same function
to the last bits, in float16 values that overflow and weights that vanish. Both tools get the same model, batch and
tolerance, one after the other in one run; the results of both are then verified by emulation, which rounds as a GPU
does. A tool that takes longer than `--limit` is stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared import measure

RTOL, ATOL = 1e-2, 3e-2
"""|a - b| <= ATOL + RTOL |a|: three times what float16 costs this model as it was exported (0.0104 at most)."""

SCALE, LAYERS = 2.0**18, (2, 6, 10)


@dataclass(frozen=True, slots=True)
class Row:
    """One tool: what it cost, how often it tried, and what it gave."""

    tool: str
    seconds: float
    processor: float
    peak: int
    stopped: bool
    tries: int
    float32: int
    low: int
    verdict: str


def planted(cache: str) -> str:
    """BERT-base with scaled attention, exported in a process of its own; its batch is that of bert_base."""
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
    """The weights that make the values of an attention, and those that read what it gives."""
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
    """onnxconverter-common's search, in its own environment; it prints each attempt."""
    import numpy as np
    import onnx
    from onnxconverter_common import auto_mixed_precision  # type: ignore[import-not-found]

    with np.load(batch) as stored:
        feed = {name: stored[name] for name in stored.files}
    found = auto_mixed_precision.auto_convert_mixed_precision(
        onnx.load(source), feed, rtol=RTOL, atol=ATOL, keep_io_types=True
    )
    onnx.save(found, target)


def judged(source: str, batch: str, target: str) -> tuple[int, int, str]:
    """How many floating ops of a result are float32 and low, and how it does when it is honestly rounded."""
    from amp_rewrite.evidence.verify import verify
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.report_builder import report_of

    rows = [r for r in report_of(View.of(Model.load(target))).rows if r.op not in ("Cast", "Constant")]
    verdict = verify(source, target, batch, rtol=RTOL, atol=ATOL, emulate=True)
    (worst,) = verdict.worst
    how = f"{'ok' if verdict.ok else 'not ok'}, largest error {worst.difference.max_abs:.3g}"
    return sum(r.dtype == "float32" for r in rows), sum(r.dtype == "float16" for r in rows), how


def measured(tool: str, command: list[str | Path], said: Path, source: str, batch: str, target: Path) -> Row:
    """One tool's run, counted and judged."""
    cost = measure.cost(command, stdout=said)
    stopped = cost.code == 124
    if cost.code not in (0, 124):
        raise SystemExit(f"{tool} failed: {cost.said}")
    found: tuple[int, int, str] = (0, 0, "no result") if stopped else measure.apart(judged, source, batch, str(target))
    return Row(tool, cost.wall, cost.cpu, cost.peak, stopped, _tries(tool, said.read_text("utf-8")), *found)


def _tries(tool: str, said: str) -> int:
    """How many candidates were made and run, as the tool itself says."""
    if tool == "amp-rewrite":
        (finding,) = [f for f in json.loads(said)["findings"] if f["kind"] == "repaired"]
        return int(re.search(r"(\d+) trial", finding["message"])[1])  # type: ignore[index]
    return len(re.findall(r"^Running attempt", said, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--peers", type=Path, required=True, help="the python of the other tools' environment")
    parser.add_argument("--limit", type=int, default=1800)
    given = parser.parse_args()
    measure.warm_up()
    source = measure.apart(planted, str(given.cache))
    batch = str(given.cache / "bert_base.npz")
    rows: list[Row] = []
    for tool in ("amp-rewrite", "onnxconverter-common auto_mixed_precision"):
        target = given.cache / f"repaired_{len(rows)}.onnx"
        target.unlink(missing_ok=True)
        rows.append(
            measured(tool, _command(tool, given, source, batch, target), given.cache / "said", source, batch, target)
        )
        print(rows[-1], file=sys.stderr)
    about = measure.machine()
    measure.write("repair", about, rows, _table(rows))


def _command(tool: str, given: Any, source: str, batch: str, target: Path) -> list[str | Path]:
    limited: list[str | Path] = ["timeout", str(given.limit)]
    if tool != "amp-rewrite":
        return [*limited, *measure.script("repair", given.peers), "--peer", source, batch, target]
    tolerance = ("--rtol", str(RTOL), "--atol", str(ATOL))
    return [*limited, *measure.own_command(), source, "-o", target, "--data", batch, *tolerance, "--json"]


def _table(rows: list[Row]) -> list[str]:
    head = ("tool", "seconds", "processor s", "peak MB", "tries", "ops float32 / float16", "result, emulated")
    cells = [
        (
            row.tool,
            f"{'> ' if row.stopped else ''}{row.seconds:.0f}",
            f"{row.processor:.0f}",
            f"{row.peak / 1e6:.0f}",
            row.tries,
            "-" if row.stopped else f"{row.float32} / {row.low}",
            row.verdict,
        )
        for row in rows
    ]
    wall, cpu = rows[1].seconds / rows[0].seconds, rows[1].processor / rows[0].processor
    more = "more than " if rows[1].stopped else ""
    said = f"Seconds of the other tool in units of amp-rewrite's: {more}{wall:.1f}; processor seconds: {more}{cpu:.1f}."
    return [*measure.markdown(head, cells), "", said]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
    else:
        main()
