"""Trials of a rewrite or a setting: its alternatives, alternating, on the file of the plain command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from benchmarks.gpu.gpu_latency import CAPTURED
from benchmarks.gpu.gpu_session import CUDA, Opened, batch_of
from benchmarks.gpu.gpu_turns import error, ratio, timed
from benchmarks.gpu.gpu_ways import files

Row = dict[str, Any]
Edit = Callable[[ModelProto], int]
"""Undoes a rewrite in place; returns the number of changes."""


def flat_biases(model: ModelProto) -> int:
    """Store biases of three axes with one axis, so that onnxruntime fuses product and sum into a Gemm."""
    changed = 0
    added = {name for node in model.graph.node if node.op_type == "Add" for name in node.input}
    for tensor in model.graph.initializer:
        if tensor.name in added and len(tensor.dims) == 3 and list(tensor.dims[:2]) == [1, 1]:
            del tensor.dims[:2]
            changed += 1
    return changed


def stated_masks(model: ModelProto) -> int:
    """Replace the attribute of causal attention with a triangular mask."""
    changed = 0
    for node in model.graph.node:
        causal = [a for a in node.attribute if a.name == "unidirectional" and a.i]
        if node.op_type == "MultiHeadAttention" and causal and len(node.input) == 3:
            node.attribute.remove(causal[0])
            node.input.extend(["", "", "stated_mask"])
            changed += 1
    if changed:
        length = next(port.type.tensor_type.shape.dim[1].dim_value for port in model.graph.input)
        mask = np.where(np.tri(length, dtype=bool), 0, -16376).astype(np.float16)[None, None]
        model.graph.initializer.append(numpy_helper.from_array(mask, "stated_mask"))
    return changed


def odd_columns(model: ModelProto) -> int:
    """Remove the padding columns of weights, and the Slice after the product."""
    wide = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Concat" and n.input[1][:6] == "zeros_"}
    products = {n.output[0]: n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in wide}
    cuts = [n for n in model.graph.node if n.op_type == "Slice" and n.input[0] in products]
    for cut in cuts:
        product = products[cut.input[0]]
        product.input[1], product.output[0] = wide[product.input[1]], cut.output[0]
        model.graph.node.remove(cut)
    return len(cuts)


TRIALS: Mapping[str, tuple[str, Edit | None, Mapping[str, Mapping[str, str]]]] = {
    "rank of a bias": ("bert_base", flat_biases, {}),
    "causality": ("gpt2", stated_masks, {}),
    "columns of a vocabulary": ("gpt2", odd_columns, {}),
    "layout": (
        "resnet50",
        None,
        {
            "NCHW": {"prefer_nhwc": "0", "fuse_conv_bias": "0"},
            "NHWC": {"prefer_nhwc": "1", "fuse_conv_bias": "0"},
            "NHWC, fused bias": {"prefer_nhwc": "1", "fuse_conv_bias": "1"},
        },
    ),
}
"""A model, the undoing of a rewrite, and provider settings, each also with a CUDA graph, by name."""


def trial(job: Mapping[str, Any]) -> Row:
    """Time the alternating choices of a trial; errors are relative to the first."""
    _, edit, settings = TRIALS[job["trial"]]
    folder, provider = Path(job["models"]), job["provider"]
    made, batch = files(folder, job["model"])["amp"], batch_of(folder, job["model"])
    row: Row = {"faults": {}, "error": {}, "places": None}
    choices: dict[str, tuple[Path, bool, Mapping[str, str]]] = {"as converted": (made, False, {})}
    if edit is not None:
        proto = onnx.load(made, load_external_data=False)
        row["places"] = edit(proto)
        other = made.with_name(f"{made.stem}.{job['trial'].replace(' ', '_')}.onnx")
        other.write_bytes(proto.SerializeToString())
        choices["without"] = (other, False, {})
    for key, stated in settings.items() if provider == CUDA else ():
        choices |= {key: (made, False, stated), f"{key}, CUDA graph": (made, True, stated)}
    ready, expected = {}, None
    for key, (file, graph, stated) in choices.items():
        try:
            opened = Opened(file, batch, provider, graph=graph, **stated)
            for _ in range(CAPTURED):
                opened.run()
            found = opened.outputs()
        except Exception as fault:  # noqa: BLE001  # onnxruntime's errors have no common base class
            row["faults"][key] = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
            continue
        expected = found if expected is None else expected
        row["error"][key], ready[key] = error(expected, found), opened
    row["time"] = timed({key: one.run for key, one in ready.items()}, job["rounds"], job["warm"], lambda: None)
    first = next(iter(row["time"]))
    row["ratio"] = {key: ratio(row["time"][first], found) for key, found in row["time"].items()}
    return row
