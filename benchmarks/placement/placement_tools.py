"""Conversions by one other tool that keeps named nodes in float32: `placement_tools TOOL IN OUT KEPT …`, in
that tool's own environment. KEPT holds one name a line. onnxruntime's own list of ops to keep is emptied; where it
writes one Cast of a value for each op to keep, all under one name, which no runtime loads, the first of them stays.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.peers import peer_tools


def onnxruntime_float16(source: str, target: str, kept: list[str]) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    given = source if peer_tools._large(source) else peer_tools._load(source)
    made = convert_float_to_float16(given, keep_io_types=True, op_block_list=[], node_block_list=kept)
    first = {name: at for at, node in reversed([*enumerate(made.graph.node)]) for name in node.output}
    again = [at for at, node in enumerate(made.graph.node) if node.op_type == "Cast" and first[node.output[0]] < at]
    for at in reversed(again):
        del made.graph.node[at]
    model = OnnxModel(made)
    model.topological_sort()
    peer_tools._save(model.model, target)


def modelopt_autocast(source: str, target: str, kept: list[str]) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    names = [f"^{re.escape(name)}$" for name in kept]
    made = convert_to_mixed_precision(source, low_precision_type="fp16", keep_io_types=True, nodes_to_exclude=names)
    peer_tools._save(made, target)


if __name__ == "__main__":
    tool, *jobs = sys.argv[1:]
    run = {f.__name__: f for f in (onnxruntime_float16, modelopt_autocast)}[tool]
    for source, target, kept in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        run(source, target, Path(kept).read_text("utf-8").split("\n"))
