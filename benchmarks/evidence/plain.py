"""Results of the plain command, `amp-rewrite model.onnx`, on hard models and on the models of the GPU measurement.

    python benchmarks/run.py plain CACHE [--only NAME …]    # writes results and docs/evidence/plain.md

The hard models are in tests/support/hard_models.py, and are judged on the data that break them. GPU models of up to
600 MB are exported by `zoo` into CACHE, or grown from benchmarks/gpu/skeletons; a small export of the same architecture
replaces larger ones. Their weights and data are random. Half precision is emulated. Rows not measured in this run keep
their numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared import measure

PAGE = measure.ROOT / "docs" / "evidence" / "plain.md"
SKELETONS = measure.ROOT / "benchmarks" / "gpu" / "skeletons"
EXPORTS = measure.ROOT / "tests" / "models"
EXPORTED = {
    "bert_base": "bert_base",
    "resnet50": "resnet50",
    "vit_base": "vit_base",
    "gpt2": "gpt2",
    "whisper": "whisper_small_encoder",
}
"""Models exported by the zoo, with their names there."""
SMALL = {"bert_large": "bert_dynamo20", "llama": "llama_dynamo21", "unet": "unet_dynamo21"}
"""Models too large for a quick check, with an export of the same architecture in tests/models."""
TINY = {"gpt2_step": "gpt2_step_tiny"}
"""Models with a small version in `gpu_models`."""
GPU = (*EXPORTED, "dense", *SMALL, *TINY)
NEAR = 1e-2
INTRO = f"""# Results of the plain command

This page shows the results of `amp-rewrite model.onnx`, without options, on [models that break in half
precision](hard_models.md) with the data that breaks them, and on the models [measured on a GPU](gpu.md) with random
data. *Right*: no error exceeds {NEAR:g} of its output's largest value, with half precision
[emulated](../concepts/emulation.md). *Kept*: the number of ops kept in float32 by the check on a random batch. *Small*:
a small export of the same architecture stands in for the model. [Trained models](trained.md) are converted with the
same command and tested at their tasks. `python benchmarks/run.py plain CACHE` writes this page.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One model. `operators`: onnxruntime's own, with their counts; `kept`: ops pinned by the check."""

    group: str
    model: str
    megabytes: float
    right: bool
    error: str
    lowered: int
    products: int
    kept: int
    operators: str


def hard(name: str, folder: str) -> tuple[str, str]:
    """Write a hard model and its data; return their paths."""
    import numpy as np
    import onnx

    from support.hard_models import HARD

    built, target = HARD[name](), Path(folder)
    onnx.save(built.model, target / f"{name}.onnx")
    np.savez(target / f"{name}.npz", **built.batch)
    return str(target / f"{name}.onnx"), str(target / f"{name}.npz")


def grown(name: str, folder: str) -> str:
    """Grow the float32 model of a skeleton; return its path."""
    from benchmarks.gpu import skeleton_files

    packed, chosen, target = (Path(folder) / part for part in ("packed", "chosen", "grown"))
    target.mkdir(exist_ok=True)
    skeleton_files.unpack(SKELETONS / f"{name}.tar.xz", packed)
    skeleton_files.select(packed, name, ("float32",), chosen)
    skeleton_files.regrow(chosen, target, name)
    return str(target / f"{name}.float32.onnx")


def tiny(name: str, folder: str) -> tuple[str, str]:
    """Build a small model of the GPU measurement and its batch; return their paths."""
    import numpy as np

    from benchmarks.gpu import gpu_models

    source, target = gpu_models.source(TINY[name]), Path(folder) / f"{name}.onnx"
    source.write(target)
    np.savez(target.with_suffix(".npz"), **source.inputs)
    return str(target), str(target.with_suffix(".npz"))


def exported(name: str, cache: str) -> tuple[str, str]:
    """Export a model of the zoo; return its path and its batch."""
    from benchmarks.shared import zoo

    path = zoo.export(EXPORTED[name], Path(cache))
    return str(path), str(path.with_suffix(".npz"))


def judged(group: str, name: str, source: str, made: str, data: str) -> Row:
    """Judge a conversion on data, or on a random batch with a different seed from the check's."""
    import amp_rewrite
    from amp_rewrite.evidence.data.sources import Drawing
    from amp_rewrite.files.protos import all_nodes
    from amp_rewrite.runtime.ports import input_ports

    model, result = amp_rewrite.Model.load(source), amp_rewrite.Model.load(made)
    ids = {port.name: (0, 32) for port in input_ports(model) if port.name.endswith("ids")}
    feed: Any = data or amp_rewrite.Feed.drawn(model, Drawing(seed=1, int_ranges=ids, free=16))
    verdict = amp_rewrite.verify(model, result, feed, tolerance=NEAR, emulate=True)
    totals = json.loads(Path(f"{made}.json").read_text("utf-8"))
    operators = Counter(node.op_type for node in all_nodes(result.proto.graph.node) if node.domain == "com.microsoft")
    return Row(
        group,
        name,
        model.nbytes / 1e6,
        verdict.ok,
        f"{verdict.largest:.2g}" if verdict.largest is not None else "not finite",
        totals["totals"]["compute_lowered"],
        totals["totals"]["compute_ops"],
        len(totals["evidence"].get("keep", ())),
        ", ".join(f"{number} {kind}" for kind, number in sorted(operators.items())),
    )


def measured(group: str, name: str, cache: str) -> Row:
    """Convert a model with the command in a separate process, and judge the result in another."""
    with tempfile.TemporaryDirectory() as folder:
        data = ""
        if group == "hard":
            source, data = measure.apart(hard, name, folder)
        elif name in EXPORTED:
            source, data = measure.apart(exported, name, cache)
        elif name in TINY:
            source, data = measure.apart(tiny, name, folder)
        elif name in SMALL:
            source = str(EXPORTS / f"{SMALL[name]}.onnx")
        else:
            source = measure.apart(grown, name, folder)
        made = str(Path(folder) / "made.onnx")
        run = measure.cost([*measure.own_command(), source, "-o", made, "--report", f"{made}.json"])
        if run.code:
            sys.exit(f"{name}: {run.said}")
        row: Row = measure.apart(judged, group, name, source, made, data)
        return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("model", "MB", "right", "largest error", "products low", "kept", "onnxruntime's operators")
    return measure.markdown(head, map(cells, rows))


def cells(row: dict[str, Any]) -> Iterator[str]:
    name, small = row["model"], {**SMALL, **TINY}.get(row["model"])
    yield f"`{name}`, small: `{small}`" if small else f"`{name}`"
    yield f"{row['megabytes']:.3g}"
    yield "yes" if row["right"] else "**no**"
    yield row["error"]
    yield f"{row['lowered']} of {row['products']}"
    yield str(row["kept"] or "-")
    yield row["operators"] or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    args = parser.parse_args()
    from dataclasses import asdict

    from support.hard_models import HARD

    names = [*(("hard", name) for name in HARD), *(("gpu", name) for name in GPU)]
    stored = measure.RESULTS / "plain.json"
    results = {row["model"]: row for row in json.loads(stored.read_text("utf-8"))["rows"]} if stored.exists() else {}
    for group, name in names:
        if args.only is None or name in args.only:
            results[name] = asdict(measured(group, name, str(args.cache)))
            print(results[name], flush=True)
            write([results[name] for _, name in names if name in results])


def write(rows: list[dict[str, Any]]) -> None:
    about = measure.machine(("onnx", "numpy", "onnxruntime-gpu"))
    measure.write("plain", about, rows, table(rows))
    where = f"{about['date']}, {about['cpu']}, {about['cores']} cores, {about['system']}."
    PAGE.write_text("\n".join([INTRO, where, "", *table(rows)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
