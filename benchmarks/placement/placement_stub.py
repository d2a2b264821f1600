"""Graphs that onnxruntime's CUDA provider builds before and after conversion, by the CUDA stub of the tests.

    python benchmarks/run.py placement_stub CACHE [--models NAME ...]

Of each model of the zoo that CACHE holds, in float32 and placed in each way: Casts of the optimized graph, floats on
the host that float32 has not there, copies between host and GPU, and the fusions that float32 has and it has not. Only
sessions are created: nothing runs, and no time is taken. Needs onnxruntime-gpu, a C compiler and CUDA's headers.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_rewrite import convert
from benchmarks.shared import measure
from support import stub

FUSED = re.compile("Norm|Gelu|Bias|Fused|Attention|Skip|Gemm|Conv")
WAYS = ("propagate", "auto")
HEAD = ("model", "by", "nodes", "Casts", "floats on the host, new", "copies", "fusions lost", "")


@dataclass(frozen=True, slots=True)
class Told:
    """One model in float32 or by one way, beside float32."""

    model: str
    by: str
    nodes: int = 0
    casts: int = 0
    host: tuple[str, ...] = ()
    copies: int = 0
    lost: str = ""
    fault: str = ""


def told(path: Path, ways: Sequence[str]) -> Iterator[Told]:
    """What the stub says of a model; each session has a process of its own."""
    (float32,) = stub.placements([path])
    yield _told(path.stem, "float32", float32, float32)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        for way in ways if "error" not in float32 else ():
            out = Path(folder) / f"{way}.onnx"
            convert(path, placement=way).save(out)
            (placed,) = stub.placements([out])
            yield _told(path.stem, way, float32, placed)


def _told(model: str, by: str, float32: Mapping[str, Any], placed: Mapping[str, Any]) -> Told:
    if "error" in placed:
        return Told(model, by, fault=" ".join(placed["error"].split())[:120])
    lost = _fused(float32) - _fused(placed)
    return Told(
        model,
        by,
        placed["nodes"],
        placed["casts"],
        tuple(sorted(set(placed["cpu_float"]) - set(float32["cpu_float"]))),
        placed["memcpy"],
        ", ".join(f"{count} {kind}" for kind, count in sorted(lost.items())),
    )


def _fused(placed: Mapping[str, Any]) -> Counter[str]:
    return Counter({kind: count for kind, count in placed["ops"].items() if FUSED.search(kind)})


def table(rows: Sequence[Told]) -> list[str]:
    """The lines of the results' table."""
    cells = (
        (r.model, r.by, r.nodes, r.casts, ", ".join(r.host) or "none", r.copies, r.lost or "none", r.fault)
        for r in rows
    )
    return measure.markdown(HEAD, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    rows: list[Told] = []
    for path in sorted(given.cache.glob("*.onnx")):
        for row in told(path, WAYS) if not given.models or path.stem in given.models else ():
            rows.append(row)
            print(table([row])[-1], flush=True)
            if not given.dry_run:
                packages = ("onnx", "numpy", "onnxruntime-gpu")
                measure.write("placement_stub", measure.machine(packages), rows, table(rows))


if __name__ == "__main__":
    main()
