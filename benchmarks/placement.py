"""What placing by minimum cut saves over spreading colours, and what it takes.

    python benchmarks/placement.py [CACHE] [--nodes 100000] [--gpu NAME ...]

Models are those of `zoo.py` that CACHE holds, and the made-up graphs of `graph_scale.py`. Of each: Casts, and the
predicted time beyond the cheapest run (Casts, float32 where low is faster, lost fusions), both ways; and the seconds
of processor time that colouring takes, one way and the other. The costs are predictions from data sheets and shapes:
nothing runs on a GPU here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import graph_scale
import measure

from amp_rewrite.draft import Draft, Request


@dataclass(frozen=True, slots=True)
class Placed:
    """One model, on one GPU, both ways; costs in microseconds, times in seconds."""

    model: str
    nodes: int
    gpu: str
    casts_spread: int
    casts_cut: int
    cost_spread: float
    cost_cut: float
    low_spread: int
    low_cut: int
    time_spread: float
    time_cut: float
    chosen: str


def placed(path: Path, gpu: str) -> Placed:
    """What both ways make of a model. Colouring by cutting includes shape inference, spreading and the comparison."""
    draft = Draft.of(path, Request.of(placement=f"mincut:{gpu}"))
    spreading = Draft.of(path, Request.of())
    start = time.process_time()
    spread = spreading.paint()
    between = time.process_time()
    cut = draft.paint()
    end = time.process_time()
    assert draft.placing is not None
    costs = [draft.placing.seconds(coloring) * 1e6 for coloring in (spread, cut)]
    casts = [len(draft.plan(coloring).casts) for coloring in (spread, cut)]
    low = [sum(coloring.lowered(op, name) for op, name in draft.placing.vertices) for coloring in (spread, cut)]
    chosen = cut.findings[-1].message.rpartition("; ")[2].split()[0]
    times = (round(between - start, 3), round(end - between, 3))
    return Placed(path.stem, len(draft.view.ops), gpu, *casts, *costs, *low, *times, chosen)  # type: ignore[arg-type]


def models(cache: Path | None, nodes: int, folder: Path) -> Iterator[Path]:
    """The models there are, made-up ones last."""
    yield from sorted(cache.glob("*.onnx")) if cache is not None else ()
    for shape in graph_scale.SHAPES if nodes else ():
        path = folder / f"{shape}_{nodes}.onnx"
        measure.apart(graph_scale.build, shape, nodes, str(path))
        yield path


def table(rows: list[Placed]) -> list[str]:
    """The lines of the results' table."""
    head = ["model", "nodes", "GPU", "Casts", "predicted µs", "low vertices", "seconds of colouring", "chosen"]
    cells = (
        (
            row.model,
            row.nodes,
            row.gpu,
            f"{row.casts_spread} → {row.casts_cut}",
            f"{row.cost_spread:.2f} → {row.cost_cut:.2f}",
            f"{row.low_spread} → {row.low_cut}",
            f"{row.time_spread:.2f} → {row.time_cut:.2f}",
            row.chosen,
        )
        for row in rows
    )
    return measure.markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--gpu", nargs="+", default=["A100", "H200", "T4", "L4"])
    given = parser.parse_args()
    rows: list[Placed] = []
    with tempfile.TemporaryDirectory() as folder:
        for path in models(given.cache, given.nodes, Path(folder)):
            for gpu in given.gpu if path.parent != Path(folder) else given.gpu[:1]:
                rows.append(measure.apart(placed, path, gpu))
                print(table(rows[-1:])[-1], flush=True)
    measure.write("placement", measure.machine(), rows, table(rows))


if __name__ == "__main__":
    main()
