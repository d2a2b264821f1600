"""Print where onnxruntime-gpu would run each node of a model, on a machine without a GPU.

    LD_LIBRARY_PATH=<stub folder> python placement.py [--level LEVEL] MODEL.onnx …

Prints one line of JSON per model, flushed at once, so that a crash costs only that model:

    nodes, ops   of the optimized graph, bodies of If/Loop/Scan included
    memcpy       copies between host and device that onnxruntime inserted
    casts        Cast nodes of the optimized graph
    cuda, cpu    nodes that the partitioner assigned to each provider
    cpu_ops      types of the nodes on the CPU: integer work on shapes is put there on purpose
    cpu_float    nodes on the CPU that read or write a float tensor, as "Op name"
    cpu_unknown  nodes on the CPU with unknown element types
    error        instead of all that: why the session could not be created

Sessions are created but not run: with the stub, outputs and timings are meaningless.
"""

import argparse
import collections
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

from amp_rewrite.files.protos import all_nodes, bodies

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
LEVELS = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
MAX_IN_ONE_FILE = 1_500_000_000
"""Bytes of weights above which they get a separate file: protobuf cannot write more than 2 GiB."""
# onnxruntime's own exceptions share no base class below Exception.
REFUSALS = tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))


Node = tuple[str, str, str]


def name_all(model: onnx.ModelProto) -> None:
    """Name each nameless node, to match it with the partitioner's answer."""
    for i, node in enumerate(all_nodes(model.graph.node)):
        node.name = node.name or f"nameless_{i}"


def node_floats(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[str, bool | None]]:
    """Yield node names, with whether each touches a float tensor; None if no operand's element type is known."""
    types = dict(outer)
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.type.HasField("tensor_type"):
            types[value.name] = value.type.tensor_type.elem_type
    types.update((t.name, t.data_type) for t in graph.initializer)
    for node in graph.node:
        known = [types[v] for v in (*node.input, *node.output) if types.get(v)]
        yield node.name, any(t in FLOATS for t in known) if known else None
        for _, body in bodies(node):
            yield from node_floats(body, types)


def float_map(model: onnx.ModelProto) -> dict[str, bool | None]:
    """Map node names to whether they touch a float tensor; None if unknown."""
    # If inference fails (contrib ops, more than 2 GB), value_info is all there is.
    with contextlib.suppress(onnx.shape_inference.InferenceError, ValueError):
        model = onnx.shape_inference.infer_shapes(model)
    return dict(node_floats(model.graph, {}))


def partition(model: onnx.ModelProto, level: str) -> tuple[list[Node], onnx.ModelProto]:
    """Return (provider, op, name) of each partitioned node, and the optimized model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    options.enable_mem_reuse = False  # planning takes seconds on long chains and changes no placement
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory() as folder:
        source, optimized = Path(folder, "source.onnx"), Path(folder, "optimized.onnx")
        apart = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_IN_ONE_FILE
        onnx.save(model, source, save_as_external_data=apart)
        options.optimized_model_filepath = str(optimized)
        if apart:
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "optimized.data"
            )
        providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        session = ort.InferenceSession(str(source), options, providers=providers, enable_fallback=0)
        if session.get_providers()[0] != "CUDAExecutionProvider":
            raise SystemExit("the CUDA provider did not load: LD_LIBRARY_PATH must name the stub folder")
        assigned = [
            (part.ep_name, node.op_type, node.name)
            for part in session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        ]
        final = onnx.load(optimized, load_external_data=not apart)
    return assigned, final


def inlined(model: onnx.ModelProto, assigned: list[Node]) -> list[tuple[str, str]]:
    """Return (domain, op) of the functions that the runtime replaced by nameless nodes."""
    names = {name for _, _, name in assigned}
    if "" not in names:
        return []
    gone = {(n.domain, n.op_type) for n in all_nodes(model.graph.node) if n.name not in names}
    return sorted(key for key in gone if has_body(*key, model))


def has_body(domain: str, op: str, model: onnx.ModelProto) -> bool:
    if any((f.domain, f.name) == (domain, op) for f in model.functions):
        return True
    if not onnx.defs.has(op, domain):
        return False
    opset = next(o.version for o in model.opset_import if o.domain == domain)
    schema = onnx.defs.get_schema(op, opset, domain)
    return bool(schema.has_function or schema.has_context_dependent_function)


def on_cpu(assigned: list[Node]) -> list[tuple[str, str]]:
    return [(op, name) for provider, op, name in assigned if provider.startswith("CPU")]


def placement(path: Path, level: str) -> dict[str, object]:
    """Return the row of the module's docstring for the model at `path`."""
    model = onnx.load(path)
    name_all(model)
    assigned, final = partition(model, level)
    ops = collections.Counter(
        f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in all_nodes(final.graph.node)
    )
    row = {
        "nodes": ops.total(),
        "ops": dict(ops.most_common()),
        "memcpy": ops["MemcpyFromHost"] + ops["MemcpyToHost"],
        "casts": ops["Cast"],
        "cuda": sum(provider.startswith("CUDA") for provider, _, _ in assigned),
        "cpu": len(on_cpu(assigned)),
        "cpu_ops": dict(collections.Counter(op for op, _ in on_cpu(assigned))),
    }
    # Nodes of the source override those that the optimizer added (Shape + Gather, an If of known condition).
    floats = {**float_map(final), **float_map(model)}
    host = [(op, name) for op, name in on_cpu(assigned) if name]
    if functions := inlined(model, assigned):
        # Nodes of function bodies are nameless in the answer: inline the functions here and query their nodes.
        before = set(floats)
        model = onnx.inliner.inline_selected_functions(model, functions, inline_schema_functions=True)
        name_all(model)
        floats |= float_map(model)
        host += [(op, name) for op, name in on_cpu(partition(model, level)[0]) if name not in before]
    return row | {
        "cpu_float": sorted(f"{op} {name}" for op, name in host if floats.get(name)),
        "cpu_unknown": sorted(f"{op} {name}" for op, name in host if floats.get(name) is None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="+", type=Path)
    parser.add_argument("--level", default="all", choices=LEVELS)
    arguments = parser.parse_args()
    refused = False
    for path in arguments.model:
        try:
            row = placement(path, arguments.level)
        except REFUSALS as refusal:
            refused = True
            row = {"error": str(refusal)[:600]}
        print(json.dumps(row), flush=True)
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
