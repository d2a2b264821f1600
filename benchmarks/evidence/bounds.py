"""Bounds against runs: random graphs with random inputs, and gradient ascent on models of real size.

    python benchmarks/run.py bounds CACHE [--graphs 400] [--inputs 250] [--steps 200] [--only NAME ...]

Exports models into CACHE, which needs torch and transformers: all layers at their real widths, for short inputs. Each
random graph runs on all inputs, 50 in a batch, in float32 and rounded to float16; every number of every value is
compared with its bound. The ascent starts from random inputs (of a model of tokens, from their embeddings, which its
bounds do not use) and follows the package's own gradients, by the sign, to make results of products large beside their
bounds; at each step every float value is compared. `nearest` is the largest share of its bound that a product reached.
Bounds lowered by 1 % are compared as well: a harness that never fails shows nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from benchmarks.shared import measure, zoo

_TOKENS = ("input_ids",)
_TARGETS = 12
_BATCH = 50
_NEAR = 0.99
_MEASURED = ("pixel_values", "sample", "input_features")
_GIVEN = (-4.0, 4.0)
"""The range of images and spectra, which the bounds use."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: `values` with a finite bound, numbers of `inputs`, violations, and how near a value came."""

    what: str
    values: int
    proved: str
    inputs: int
    violations: int
    violations_lowered: int
    nearest: float
    nearest_value: str
    seconds: float
    first: str = ""


def random_graphs(graphs: int, inputs: int, first: int) -> Row:
    """Compare random graphs on random inputs."""
    from support.bound_check import Probe, feeds
    from support.bound_graphs import random_graph

    started, values, violations, lowered, runs, sample = time.process_time(), 0, 0, 0, 0, ""
    for seed in range(first, first + graphs):
        model = random_graph(seed, 8, free=True)
        probe = Probe(model)
        values += sum(state.known for state in probe.states.values())
        shape = (1, *(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]))
        rng = np.random.default_rng(seed + 10**6)
        for number in range(0, inputs, _BATCH):
            feed = {"x": np.concatenate([feeds(rng, shape) for _ in range(min(_BATCH, inputs - number))])}
            found = probe.violations(feed)
            violations += len(found)
            sample = sample or (f"graph {seed}: {found[0]}" if found else "")
            lowered += len(probe.violations(feed, lowered=_NEAR))
            runs += len(feed["x"])
    seconds = time.process_time() - started
    return Row(f"{graphs} random graphs", values, "", runs, violations, lowered, math.nan, "", seconds, sample)


def ascent(folder: Path, name: str, steps: int) -> Row:
    """Climb on a model of real size."""
    import onnxruntime

    import amp_rewrite
    from amp_rewrite.evidence.bounds import bounds

    path = measure.apart(zoo.export, name, folder, zoo.SHORT[name])
    started = time.process_time()
    source, fed = _free_inputs(path, dict(np.load(folder / f"{name}.npz")))
    given = {key: _GIVEN for key, array in fed.items() if array.dtype == np.float32 and key in _MEASURED}
    found = bounds(source, given)
    rows = {row.value: row for row in found.rows if row.absmax < math.inf and not row.fills and row.kind != "input"}
    heavy = found.counts(heavy=True)
    proved = f"{heavy['proved to fit']} of {sum(heavy.values())}"
    targets = [row.value for row in found.rows if row.heavy and row.value in rows]
    targets = targets[:: max(1, len(targets) // _TARGETS)][:_TARGETS]
    climbing = [key for key, array in fed.items() if array.dtype == np.float32]
    model = amp_rewrite.gradients(_with_loss(source, targets, rows), "the_loss", climbing)
    file = folder / f"{name}.ascent.onnx"
    shown = _shown(model.proto, rows)
    type(model)(shown, held_path(model)).save(file, overwrite=True, external_data=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more would wait for each other on a shared machine
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    rng, violations, lowered, nearest, sample = np.random.default_rng(0), 0, 0, (0.0, ""), ""
    feed = {key: rng.standard_normal(a.shape).astype(a.dtype) if key in climbing else a for key, a in fed.items()}
    for step in range(steps):
        weights = np.zeros(len(targets), np.float32)
        weights[step * len(targets) // steps] = 1.0
        results = dict(zip(names, session.run(names, {**feed, "the_weights": weights}), strict=True))
        fault = False
        for value, row in rows.items():
            if value not in results or not results[value].size:
                continue
            top, bottom = float(results[value].max()), float(results[value].min())
            share = max(top / row.hi if row.hi > 0 else 0.0, bottom / row.lo if row.lo < 0 else 0.0)
            wrong = not (top <= row.hi and bottom >= row.lo)  # a NaN is wrong, too
            fault = fault or wrong
            sample = sample or (f"{value} in step {step}" if wrong else "")
            if row.heavy and share > nearest[0]:
                nearest = share, value
            lowered += share > _NEAR
        violations += fault
        for key in climbing:
            slope = results[f"{key}_grad"]
            feed[key] = feed[key] + 0.05 * np.sign(slope) * max(float(np.abs(feed[key]).std()), 1e-3)
            feed[key] = np.clip(feed[key], *_GIVEN) if key in given else feed[key]
    file.unlink()
    for data in folder.glob(f"{name}.ascent.*.data"):
        data.unlink()
    seconds = time.process_time() - started
    return Row(name, len(rows), proved, steps, violations, lowered, nearest[0], nearest[1], seconds, sample)


def held_path(model: Any) -> Path | None:
    """Return the path of a model."""
    return model.path if isinstance(model.path, Path) else None


def _free_inputs(path: Path, fed: dict[str, np.ndarray]) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a model whose embeddings are an input, if it reads tokens, and its inputs."""
    from amp_rewrite import Model, View
    from amp_rewrite.ir.shapes.infer import known_dims
    from amp_rewrite.ir.view import MAIN

    model = Model.load(path)
    tokens = [name for name in _TOKENS if name in fed]
    if not tokens:
        return model, fed
    view = View.of(model)
    lookups = [op for op in view.ops if op.kind == "Gather" and view.constant(op.inputs[0]) is not None]
    lookup = max(lookups, key=lambda op: view.constant(op.inputs[0]).dims[0])  # type: ignore[union-attr]
    dims = known_dims(view)[MAIN, lookup.node.output[0]]
    proto = ModelProto()
    proto.CopyFrom(view.model.proto)
    made = lookup.node.output[0]
    node = next(n for n in proto.graph.node if made in n.output)
    proto.graph.node.remove(node)
    shape = tuple(int(dim) for dim in dims)  # type: ignore[arg-type]
    proto.graph.input.append(helper.make_tensor_value_info(made, TensorProto.FLOAT, shape))
    if not any(tokens[0] in n.input for n in proto.graph.node):
        proto.graph.input.remove(next(i for i in proto.graph.input if i.name == tokens[0]))
        fed = {key: array for key, array in fed.items() if key != tokens[0]}
    return Model(proto, path), {**fed, made: np.zeros(shape, np.float32)}


def _with_loss(model: Any, targets: list[str], rows: Mapping[str, Any]) -> Any:
    """Return a model with a loss: the mean of large shares of bounds, of the target that a weight chooses."""
    from amp_rewrite import Model

    proto = ModelProto()
    proto.CopyFrom(model.proto)
    graph, parts = proto.graph, []
    graph.initializer.append(helper.make_tensor("the_power", TensorProto.FLOAT, [], [8.0]))
    for number, target in enumerate(targets):
        graph.initializer.append(
            helper.make_tensor(f"the_bound_{number}", TensorProto.FLOAT, [], [1.0 / max(rows[target].absmax, 1e-3)])
        )
        graph.initializer.append(helper.make_tensor(f"the_row_{number}", TensorProto.INT64, [1], [-1]))
        for kind, inputs, output in (
            ("Mul", [target, f"the_bound_{number}"], f"the_share_{number}"),
            ("Reshape", [f"the_share_{number}", f"the_row_{number}"], f"the_flat_{number}"),
            ("Mul", [f"the_flat_{number}", f"the_flat_{number}"], f"the_square_{number}"),
            ("Mul", [f"the_square_{number}", f"the_square_{number}"], f"the_fourth_{number}"),
        ):
            graph.node.append(helper.make_node(kind, inputs, [output]))
        graph.node.append(helper.make_node("ReduceSum", [f"the_fourth_{number}"], [f"the_part_{number}"], keepdims=1))
        parts.append(f"the_part_{number}")
    graph.node.append(helper.make_node("Concat", parts, ["the_parts"], axis=0))
    graph.node.append(helper.make_node("Mul", ["the_parts", "the_weights"], ["the_weighted"]))
    graph.node.append(helper.make_node("ReduceSum", ["the_weighted"], ["the_loss"], keepdims=0))
    graph.input.append(helper.make_tensor_value_info("the_weights", TensorProto.FLOAT, [len(targets)]))
    graph.output.append(helper.make_tensor_value_info("the_loss", TensorProto.FLOAT, []))
    return Model(proto, model.path)


def _shown(proto: ModelProto, rows: Mapping[str, Any]) -> ModelProto:
    """Return a model that gives all values with a bound."""
    shown = ModelProto()
    shown.CopyFrom(proto)
    made = {name for node in shown.graph.node for name in node.output}
    held = {output.name for output in shown.graph.output}
    shown.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in rows if name in made - held
    )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--graphs", type=int, default=400)
    parser.add_argument("--inputs", type=int, default=250)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--keep", type=Path, help="rows of an earlier run, to add to, as JSON lines")
    arguments = parser.parse_args()
    chosen = arguments.only if arguments.only is not None else ("graphs", *zoo.SHORT)
    rows = [Row(**json.loads(line)) for line in arguments.keep.read_text().splitlines()] if arguments.keep else []
    for name in chosen:
        made = (
            random_graphs(arguments.graphs, arguments.inputs, arguments.first)
            if name == "graphs"
            else ascent(arguments.cache, name, arguments.steps)
        )
        rows = [row for row in rows if row.what != made.what] + [made]
        print(json.dumps(asdict(made)), flush=True)
    write(rows)


def write(rows: list[Row]) -> None:
    """Write the table of all rows."""
    head = (
        "runs",
        "values with a bound",
        "products proved to fit",
        "inputs or steps",
        "violations",
        "violations of bounds lowered by 1 %",
        "nearest",
        "at",
        "processor time",
    )
    cells = [
        (
            r.what,
            r.values,
            r.proved or "–",
            r.inputs,
            r.violations,
            r.violations_lowered,
            "–" if math.isnan(r.nearest) else f"{100 * r.nearest:.0f} %",
            r.nearest_value or "–",
            f"{r.seconds:.0f} s",
        )
        for r in rows
    ]
    table = ["Values of runs beside their bounds, for float16.", "", *measure.markdown(head, cells)]
    measure.write("bounds", measure.machine(("onnx", "onnxruntime-gpu", "numpy")), rows, table)


if __name__ == "__main__":
    main()
