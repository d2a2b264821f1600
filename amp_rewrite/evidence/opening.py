"""Preparation of models for a measurement: device, emulation, casts of weights, and checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import GraphProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes, clone, names_read, refill
from amp_rewrite.files.tensors import is_stub, make_stub, source, without_values
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.view import MAIN, Op, View
from amp_rewrite.rewrite.builder import new_cast
from amp_rewrite.rewrite.check import misdeclared_output
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.node_builder import NodeBuilder
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.faults import float32_products
from amp_rewrite.runtime.gpu import main_memory
from amp_rewrite.runtime.installation import NO_KERNEL
from amp_rewrite.runtime.providers import CUDA_ONLY
from amp_rewrite.runtime.runner import CPU, CUDA, TENSORRT, WEBGPU, Runner, SessionOptions, cuda_works, webgpu_works
from amp_rewrite.settings.choices import Target, recorded_target


@dataclass(frozen=True, slots=True)
class Device:
    """Execution provider and emulation of a model's runs.

    `provider`: the required provider; None means CUDA if it loads and the CPU otherwise, or WebGPU for a model with
    that target. `emulate`: run low ops as float32 ops with rounding; by default only if no provider with low types
    loads.
    """

    provider: str | None = None
    emulate: bool | None = None

    def choose(self, model: Model) -> tuple[str, bool]:
        """Return the provider of a model, and True if its low ops are emulated.

        Without a WebGPU device, a model for WebGPU is emulated as on CUDA, with smaller errors than WebGPU's sums in
        float16.
        """
        webgpu = recorded_target(model) == Target.WEBGPU and self.provider is None
        if webgpu and self.emulate is not True and webgpu_works():
            return WEBGPU, False
        default = webgpu or (self.provider in (None, CPU, CUDA, TENSORRT) and not cuda_works())
        return provider_or_default(self.provider), default if self.emulate is None else self.emulate


def provider_or_default(named: str | None) -> str:
    """Return the named provider or, without a name, CUDA if it loads and the CPU otherwise."""
    return (CUDA if cuda_works() else CPU) if named is None else named


def session_on(provider: str, threads: int = 0, options: Mapping[str, str] | None = None) -> SessionOptions:
    """Return the options of a session on a provider. `options`: options of the provider itself."""
    providers, by_provider = tuple(dict.fromkeys((provider, CPU))), {provider: options} if options else {}
    return SessionOptions(providers=providers, provider_options=by_provider, channels_last=True, threads=threads)


def check_as_is(model: Model, name: str, provider: str) -> None:
    """Raise ModelError, with the model's name, if a model is invalid; its emulation could hide the fault.

    The model must load on the provider, and its outputs must have their declared types. Kernels may be missing, because
    the emulation does not need them.
    """
    fault = misdeclared_output(View.of(inlined(model)))
    if fault is not None:
        raise ModelError(f"{name}: {fault}")
    providers = tuple(dict.fromkeys((provider, CPU)))
    try:
        open_on(model, name, SessionOptions(providers=providers, optimized=False, planned=False, spinning=False))
    except ModelError as error:
        if NO_KERNEL not in str(error):
            raise


def open_on(model: Model, name: str, options: SessionOptions) -> Runner:
    """Open a model on the first provider. Raise ModelError, with the model's name, if it does not load there."""
    provider = options.providers[0]
    try:
        runner = Runner.open(model, options)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    if runner.provider != provider:
        raise ModelError(
            f"{name}: {provider} cannot be used on this machine; use {spelled('provider', runner.provider)}, or install"
            " its libraries"
        )
    return runner


def name_of(model: object, default: str) -> str:
    path = model.path if isinstance(model, Model) else model if isinstance(model, (str, os.PathLike)) else None
    return Path(path).name if path is not None else default


def unrolled(feed: Feed, model: Model) -> Feed:
    """Return a feed with one batch per run; a float32 model computes the states."""
    back = feed.feedback
    if back is None:
        return feed
    runner, names = Runner.open(decompose(model)), list(dict(back.pairs))

    def source() -> Iterator[Batch]:
        outputs: dict[str, Any] = {}
        for number, batch in enumerate(feed):
            yield (fed := back.inputs(number, batch, outputs))
            outputs = runner.run(fed, names)

    return replace(feed, feedback=None, _allow_nonfinite=True, _source=source, _count=len(feed), _checksum=None)


def low_types(model: Model) -> tuple[str, ...]:
    """Return the names of the low types in a model and its local functions."""
    return tuple(sorted(dtype.spelling for dtype in View.of(inlined(model)).low_types))


def decompose(model: Model) -> Model:
    """Decompose the operators without a CPU kernel in a float32 model."""
    bodies = (model.proto.graph.node, *(function.node for function in model.proto.functions))
    needs_cuda = any(node.op_type in CUDA_ONLY for body in bodies for node in all_nodes(body))
    return emulate(model, rounding=False, io="float32") if needs_cuda else model


def random_op_notes(model: Model, name: str) -> Iterator[str]:
    """Yield a note if ops draw random numbers without a seed: their outputs cannot be compared."""
    view = View.of(model)
    drawn = [op for op in view.ops if _draws(view, op) and all(a.name != "seed" for a in op.node.attribute)]
    if drawn:
        more = f" and {len(drawn) - 1} more" if drawn[1:] else ""
        yield (
            f"{name} draws different random numbers in each run; to compare runs, set the `seed` attribute of"
            f" {drawn[0].name!r} ({drawn[0].kind}){more}"
        )


def _draws(view: View, op: Op) -> bool:
    if op.op_type != "Dropout":
        return op.op_type in RANDOM
    mode = op.inputs[2] if len(op.inputs) > 2 else None
    tensor = view.constant(mode)
    return mode is not None and (tensor is None or bool(view.model.array(tensor).any()))


def casting_in_graph(model: Model) -> Model:
    """Replace pending casts of weights with equivalent Cast nodes.

    A pending cast must finish, in memory or in a file, before the model loads. A Cast node runs when the weight is
    read, and for a lookup table it casts only the gathered rows. Where a pending cast saturates, a Cast node would
    return infinity, so these weights keep their pending casts. O(bytes of weights to round), streamed.
    """
    proto = clone(model.proto)
    inputs = {v.name for v in proto.graph.input}
    names = inputs.union((t.name for t in proto.graph.initializer), *(node.output for node in proto.graph.node))
    tables = _tables(proto.graph)
    casts: list[NodeProto] = []
    gathered_casts: dict[str, NodeProto] = {}
    for tensor in proto.graph.initializer:
        stored = _stored(model, tensor) if tensor.name not in inputs else None
        if stored is None:
            continue
        stored.name, to = claimed(stored.name, names), DType(tensor.data_type)
        for gather in tables.get(tensor.name, ()):
            gather.input[0], result = stored.name, gather.output[0]
            gather.output[0] = claimed(f"{result}/stored", names)
            gathered_casts[gather.output[0]] = new_cast(gather.output[0], result, to, name=f"{result}/cast")
        if tensor.name not in tables:
            casts.append(new_cast(stored.name, tensor.name, to, name=f"{tensor.name}/cast"))
        tensor.CopyFrom(stored)
    nodes = [part for node in proto.graph.node for part in (node, *filter(None, map(gathered_casts.get, node.output)))]
    refill(proto.graph, "node", [*casts, *nodes])
    return replace(model, proto=proto)


def _tables(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """Return the Gather nodes of each lookup table without other readers, by the table's name."""
    gathers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        if (node.domain, node.op_type) == ("", "Gather"):
            gathers.setdefault(node.input[0], []).append(node)
    others = (node for node in graph.node if node.op_type != "Gather" or node.domain)
    read = {*names_read(others), *(v.name for v in graph.output), *(n.input[1] for g in gathers.values() for n in g)}
    return {name: nodes for name, nodes in gathers.items() if name not in read}


_IN_TF32 = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "com.microsoft::FusedMatMul"})


def in_tf32(model: Model) -> Model | None:
    """Round the operands of float32 products to TF32, as tensor cores do; sums are kept in float32.

    Return None if the model has such products inside recurrent cells, attention or bodies, where no node can round
    them. TF32 keeps 11 of the 24 significant bits. In float64, x (2⁴² + 1) − (x (2⁴² + 1) − x) keeps 53 − 42 = 11
    (T. J. Dekker, A Floating-Point Technique for Extending the Available Precision, Numerische Mathematik 18, 1971).
    """
    view = View.of(model)
    products = {op.id: op for op in float32_products(view, view.dtype)}
    if any(op.scope != MAIN or op.kind not in _IN_TF32 for op in products.values()):
        return None
    proto, taken, nodes = clone(model.proto), set(view.names), list[NodeProto]()
    for op_id, node in zip(view.scopes[MAIN].ops, proto.graph.node, strict=True):
        if op_id in products:
            steps = NodeBuilder(taken, opset=view.opset, region=view.ops[op_id].name)
            for slot, name in enumerate(node.input[:2]):
                wide = steps.cast(name, DType.DOUBLE)
                far = steps.op("Mul", wide, steps.scalar(2.0**42 + 1, DType.DOUBLE))
                node.input[slot] = steps.cast(steps.op("Sub", far, steps.op("Sub", far, wide)), DType.FLOAT)
            nodes += steps.nodes
        nodes.append(node)
    refill(proto.graph, "node", nodes)
    return replace(model, proto=proto)


def quick_to_load(model: Model) -> Model:
    """Return the model in its fastest form to load.

    Pending casts become Cast nodes, which onnxruntime folds in memory; otherwise, the whole model would be written to a
    temporary folder. This applies up to a quarter of the machine's memory, since two models may be loaded at once. A
    larger model is left in a file, because the system can then release its pages.
    """
    return casting_in_graph(model) if model.nbytes <= main_memory() // 4 else model


def _stored(model: Model, tensor: TensorProto) -> TensorProto | None:
    """Return the weight in its stored type; None if no Cast node can replace its pending cast."""
    if not is_stub(tensor):
        return None
    place, to = source(tensor), DType.of(tensor.data_type)
    if to is None or place.dtype is to or place.exponent or not (to.floating and place.dtype.floating):
        return None
    stored = without_values(tensor)
    make_stub(stored, place)
    stored.name, stored.data_type = f"{tensor.name}/stored", place.dtype.code
    return None if to.low and model.fit(stored, to).overflow else stored
