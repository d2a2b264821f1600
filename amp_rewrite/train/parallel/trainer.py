"""The data-parallel trainer: replicas of one step, each with its own rows, that stay equal bit by bit.

A step is cut after its gradients. Each replica runs the first half on its rows. One exchange then averages gradients
(still scaled, float32), new running statistics, loss and metrics, in one flat float32 bucket, and each replica runs
the second half on the mean. So the finite test sees the same values on all replicas, and all of them skip or step
alike. This is TensorFlow's rule for replicas (a step is finite only if it is on each), without a second exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.graphs import names_read
from amp_rewrite.ir.view import View
from amp_rewrite.runtime.buffers import Side
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.parallel.replicas import Replicas, averaged, check_strategy
from amp_rewrite.train.step.batches import read_by
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.graph import REGION


class DataParallelTrainer(Trainer):
    """A `Trainer` that is one of several replicas: each `fit`s its own rows, and all have the same state afterwards.

    Loss, metrics and gradients are means over all replicas, weighted by rows. So a step equals that of the joined
    batch if its loss is a mean over rows. Running statistics are means over replicas; each replica normalizes by its
    own rows. `evaluate` uses only its own data. `save` writes on replica 0 and returns on all replicas after that.
    Each micro-batch needs an exchange.

    Args:
        step: the step.
        replicas: the replicas, from `join_replicas`.
        **options: those of `Trainer`.

    Raises:
        TrainingError: `replicas` is another object or has ended, or starts differ.
    """

    def __init__(self, step: TrainingStep, replicas: Replicas, **options: Any) -> None:
        check_strategy(replicas)
        self.replicas = replicas
        super().__init__(step, **options)
        self._number()
        self._check_same()

    def _open(self) -> Exchange:
        return Exchange(self._model, self.step, self.replicas, self._options)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint on replica 0; return on all replicas after that."""
        if self.replicas.rank == 0:
            super().save(path)
        self._check_same()

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, on all replicas."""
        super().load(path)
        self._number()
        self._check_same()

    def _number(self) -> None:
        """Tell the step the number of its replica, so that each replica draws other random numbers."""
        name = next((v.input for v in self.step.state if v.name == "replica"), None)
        if name is not None:
            self._stepper.buffer.put(self._now.side, {name: np.array(self.replicas.rank, np.int64)})

    def _check_same(self) -> None:
        """Wait for all replicas; raise TrainingError unless they have the same step and state."""
        digest = hashlib.sha256(self.step.model.proto.SerializeToString(deterministic=True))
        own = {v.input for v in self.step.state if v.name == "replica"}
        for name, array in sorted(self._views().items()):
            digest.update(b"" if name in own else array.tobytes())
        bits = np.unpackbits(np.frombuffer(digest.digest(), np.uint8)).astype(np.float32)
        sums = self.replicas.total(bits)
        if ((sums != 0) & (sums != self.replicas.world)).any():  # true on all replicas or on none
            raise TrainingError(
                f"replica {self.replicas.rank} of {self.replicas.world}: the replicas differ in step or state; build"
                " all of them from the same model and options, or load the same checkpoint"
            )


class Exchange:
    """A step in two halves with an exchange between them; `run` has the inputs and outputs of the whole step.

    The state stays on the device; values that cross go through the host.
    """

    def __init__(self, model: Model, step: TrainingStep, replicas: Replicas, options: SessionOptions) -> None:
        """Open the halves of `model`, that of the step or its emulation."""
        successors = {v.input: v.output for v in step.state}
        flags = (step.finite, step.applied)
        halves = cut(model)
        first, second = (Runner.open(half, options) for half in (halves.gradients, halves.apply))
        self.buffer = second.double_buffer({v.input: v.initial for v in step.state})
        self.means = step.scalars
        averages = tuple(dict.fromkeys((*self.means, *halves.crossing)))
        self.gradients = first.buffered(self.buffer, {}, averages)
        self.apply = second.buffered(self.buffer, successors, flags)
        self.provider = self.gradients.provider
        self.batch = step.batch
        self.replicas = replicas

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run a step; return loss, metrics and flags, the same on all replicas."""
        local = self.gradients.run(side, read_by(self.gradients, feeds))
        rows = max((np.shape(feeds[n])[0] for n in self.batch if np.ndim(feeds[n])), default=1)
        means = averaged(self.replicas, list(local.values()), rows)
        shared = {name: mean for name, mean in zip(local, means, strict=True) if mean is not None}
        flags = self.apply.run(side, read_by(self.apply, {**feeds, **shared}))
        return {**flags, **{name: shared[name] for name in self.means}}


@dataclass(frozen=True, slots=True, eq=False)
class SplitStep:
    """A step as two models. `crossing`: float32 outputs of `gradients` that are inputs of `apply`."""

    gradients: Model
    apply: Model
    crossing: tuple[str, ...]


def cut(model: Model) -> SplitStep:
    """Split a step's model after its gradients; the halves in sequence give the same bits as the whole.

    TrainingError if the model is not a step, or if a value that crosses is not float32.
    """
    graph = model.proto.graph
    first: list[NodeProto] = []
    last: list[NodeProto] = []
    updated: set[str] = set()
    for node in graph.node:
        later = node.name.startswith(f"{REGION}/")
        (last if later else first).append(node)
        updated.update(node.output if later else ())
    back = next((name for name in names_read(first) if name in updated), None)
    if not last or back is not None:
        what = f"{back!r} of the update is read by the backward pass" if last else f"no node is named {REGION}/…"
        raise TrainingError(f"the model cannot be cut into gradients and update: {what}; pass a step's model")
    needed = dict.fromkeys(name for name in names_read(last) if name not in updated)
    producer = {o: n for n in first for o in n.output}
    constants = [n for n in first if n.op_type == "Constant" and n.output[0] in needed]
    results = producer.keys() - {n.output[0] for n in constants}
    crossing = tuple(name for name in needed if name in results)
    view = View.of(model)
    types = {v.name: view.dtype(v.id) for v in view.values if v.name in crossing}
    strange = next((name for name in crossing if types[name] is not DType.FLOAT), None)
    if strange is not None:
        raise TrainingError(
            f"the update reads {strange!r}, which is not float32 and cannot be averaged; pass a step's model"
        )
    before = [v.name for v in graph.output if v.name not in updated]
    after = [v.name for v in graph.output if v.name in updated]
    return SplitStep(
        _half(model, first, (), [*before, *(name for name in crossing if name not in before)]),
        _half(model, [*constants, *last], crossing, after),
        crossing,
    )


def _half(model: Model, nodes: Sequence[NodeProto], extra: Sequence[str], outputs: Sequence[str]) -> Model:
    graph = model.proto.graph
    read = set(names_read(nodes))
    existing = {v.name: v for v in graph.output}
    proto = clone(model.proto)
    for part in ("node", "input", "output", "value_info", "initializer", "sparse_initializer"):
        proto.graph.ClearField(part)
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(v for v in graph.input if v.name in read)
    proto.graph.input.extend(declared(name, DType.FLOAT, None) for name in extra)
    proto.graph.output.extend(existing.get(name) or declared(name, DType.FLOAT, None) for name in outputs)
    proto.graph.initializer.extend(t for t in graph.initializer if t.name in read)
    proto.graph.sparse_initializer.extend(s for s in graph.sparse_initializer if s.values.name in read)
    return replace(model, proto=proto)
