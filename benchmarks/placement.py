"""What placing by minimum cut saves over spreading colours, and what it takes; and how other converters place Casts.

    python benchmarks/placement.py [CACHE] [--nodes 100000] [--gpu NAME ...] [--peers PYTHON] [--autocast PYTHON]

Models are the exported ones in `tests/models`, those of `zoo.py` that CACHE holds, and the made-up graphs of
`graph_scale.py`. Of each: Casts added, and the predicted time that a model takes beyond the cheapest run (Casts,
float32 where low is faster, lost fusions), by every way to place and every other converter; and the seconds of
processor time that colouring takes. `--peers` is an interpreter with onnxruntime's converter, `--autocast` one with
nvidia-modelopt[onnx]: they are given the nodes that `auto` keeps in float32, and place the Casts between those and the
others. Their models are judged by the same function as ours: by what stands in the converted model.
The costs are predictions from data sheets and shapes: nothing runs on a GPU here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import graph_scale
import measure

from amp_rewrite import AmpRewriteError, DType, Model, View, convert
from amp_rewrite.draft import Draft, Request
from amp_rewrite.op import MAIN, Op, ValueId
from amp_rewrite.placement.question import PAIRS
from amp_rewrite.placement.work import ATTOSECONDS, Work
from amp_rewrite.policy import Placement
from amp_rewrite.roofline import Roof

FIXTURES = Path(__file__).parents[1] / "tests" / "models"
COMPUTE = ("MatMul", "Conv", "Gemm")
WAYS = ("propagate", "auto", "mincut")


@dataclass(frozen=True, slots=True)
class Placed:
    """One model by one way or converter; `cost` in microseconds, `seconds` of processor time for colouring."""

    model: str
    nodes: int
    gpu: str
    tool: str
    casts: int | None
    cost: float | None
    low: int
    compute: int
    seconds: float | None
    fault: str = ""


def judged(path: str, gpu: str, before: str) -> tuple[int, float, int, int]:
    """Casts that a converted model has more than its source, its predicted cost, and its products: low ones, all."""
    view, source = View.of(Model.load(path)), View.of(Model.load(before))
    roof = Placement.parse(f"mincut:{gpu}").roof
    assert roof is not None
    work = Work(view, roof, DType.FLOAT16, _sizes(view, source, roof))
    cost = sum(cost_of(view, work, op) for op in view.ops)
    compute = [op for op in view.ops if op.kind in COMPUTE]
    low = sum(op.inputs[0] is not None and view.dtype(op.inputs[0]) is DType.FLOAT16 for op in compute)
    return _casts(view) - _casts(source), cost / ATTOSECONDS * 1e6, low, len(compute)


def _sizes(view: View, source: View, roof: Roof) -> dict[ValueId, int]:
    """Elements of a converted model's values: as many as those of their names have in the source."""
    asked = Work(source, roof, DType.FLOAT16)
    named = {value.name: asked.size(value.id) for value in source.values if value.scope == MAIN}
    found = {v.id: named[v.name] for v in view.values if v.scope == MAIN and v.name in named}
    for op in view.ops:
        if op.kind == "Cast" and op.inputs[0] in found and op.outputs[0] is not None:
            found.setdefault(op.outputs[0], found[op.inputs[0]])
    return found


def _casts(view: View) -> int:
    return sum(op.kind == "Cast" for op in view.ops)


def cost_of(view: View, work: Work, op: Op) -> int:
    """What one op costs beyond running it in the low type, in attoseconds: a Cast, float32, a pair parted by a Cast."""
    value = op.inputs[0] if op.inputs else None
    if op.kind == "Cast":
        ends = {view.dtype(v) for v in (value, op.outputs[0]) if v is not None}
        if value is None or ends != {DType.FLOAT, DType.FLOAT16} or view.constant(value) is not None:
            return 0
        maker = view.producer(value)
        parted = maker is not None and any((maker.kind, reader.kind) in PAIRS for reader in _readers(view, op))
        return work.cast(value) + (work.trip(value) if parted and len(view.uses[value]) == 1 else 0)
    if op.bodies:
        return 0
    ports = [v for v in (*op.inputs, *op.outputs) if v is not None and view.dtype(v) is DType.FLOAT]
    return work.loss(op, ports, main=value in ports) if ports else 0


def _readers(view: View, op: Op) -> Iterator[Op]:
    return view.readers(op.outputs[0]) if op.outputs[0] is not None else iter(())


def own(paths: Sequence[Path], gpu: str, folder: Path) -> list[Placed]:
    """What each way to place makes of models."""
    return [_own(path, gpu, way, folder) for path in paths for way in WAYS]


def _own(path: Path, gpu: str, way: str, folder: Path) -> Placed:
    """What one way makes of it. Colouring includes what inference of shapes it needs."""
    placement = f"mincut:{gpu}" if way == "mincut" else way
    draft = Draft.of(path, Request.of(placement=placement, fuse="basic"))
    start = time.process_time()
    draft.paint()
    seconds = time.process_time() - start
    out = folder / "own.onnx"
    convert(path, placement=placement).save(out, overwrite=True)
    return Placed(path.stem, len(draft.view.ops), gpu, way, *judged(str(out), gpu, str(path)), round(seconds, 3))


def kept(path: Path) -> list[str]:
    """The nodes of a model that `auto` leaves in float32."""
    converted = convert(path, placement="auto")
    named = {op.name for op in View.of(Model.load(path)).ops}
    found = ((op.name, converted.coloring.of(op.id)) for op in converted.view.ops)
    return [name for name, paint in found if name in named and paint is not None and paint.dtype is DType.FLOAT]


def others(paths: Sequence[Path], gpu: str, tool: str, python: Path, folder: Path, limit: float) -> Iterator[Placed]:
    """What another converter makes of models, several in one process, which goes on behind one at which it fails."""
    driver = Path(__file__).with_name("placement_tools.py")
    rest = list(paths)
    while rest:
        jobs = [(path, folder / f"{path.stem}.{tool}.onnx", folder / f"{path.stem}.kept") for path in rest]
        for path, _, names in jobs:
            names.write_text("\n".join(kept(path)), "utf-8")
        run = measure.cost([python, driver, tool, *chain.from_iterable(jobs)], limit=limit, memory=12e9)
        for path, out, _ in jobs:
            rest.remove(path)
            if not out.exists():
                said = run.said.splitlines()[-1] if run.said else f"exit code {run.code}"
                yield Placed(path.stem, 0, gpu, tool, None, None, 0, 0, None, said[:120])
                break
            yield _other(path, gpu, tool, out)
            for made in folder.glob(f"{out.name}*"):
                made.unlink()


def _other(path: Path, gpu: str, tool: str, out: Path) -> Placed:
    try:
        return Placed(path.stem, 0, gpu, tool, *judged(str(out), gpu, str(path)), None)
    except AmpRewriteError as fault:
        return Placed(path.stem, 0, gpu, tool, None, None, 0, 0, None, " ".join(str(fault).split())[:120])


def made_up(nodes: int, folder: Path) -> Iterator[Path]:
    """The graphs of `graph_scale.py`."""
    for shape in graph_scale.SHAPES if nodes else ():
        path = folder / f"{shape}_{nodes}.onnx"
        measure.apart(graph_scale.build, shape, nodes, str(path))
        yield path


def table(rows: list[Placed]) -> list[str]:
    """The lines of the results' table."""
    head = ["model", "nodes", "GPU", "by", "Casts added", "predicted µs", "products low", "seconds of colouring", ""]
    cells = (
        (
            *(row.model, row.nodes or "", row.gpu, row.tool),
            *(("–", "–", "–") if row.casts is None else (row.casts, f"{row.cost:.2f}", f"{row.low} of {row.compute}")),
            *("" if row.seconds is None else f"{row.seconds:.3f}", row.fault.replace("|", "/")),
        )
        for row in rows
    )
    return measure.markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--gpu", nargs="+", default=["A100"])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that another converter may take")
    given = parser.parse_args()
    peers = {"onnxruntime_float16": given.peers, "modelopt_autocast": given.autocast}
    rows: list[Placed] = []

    def add(more: Iterable[Placed]) -> None:
        for row in more:
            rows.append(row)
            print(table([row])[-1], flush=True)
            measure.write("placement", measure.machine(), rows, table(rows))  # keeps what it has if it is broken off

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported = sorted(FIXTURES.glob("*.onnx"))
        real = sorted(given.cache.glob("*.onnx")) if given.cache is not None else []
        for gpu in given.gpu:
            for batch in (exported, *([path] for path in real)):
                add(measure.apart(own, batch, gpu, folder))
        for path in made_up(given.nodes, folder):
            add(measure.apart(own, [path], given.gpu[0], folder))
        for batch in (exported, *([path] for path in real)):
            for tool, python in peers.items():
                if python is not None:
                    add(others(batch, given.gpu[0], tool, python, folder, given.limit))


if __name__ == "__main__":
    main()
