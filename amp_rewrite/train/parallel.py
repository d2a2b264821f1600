"""Data-parallel training: replicas of one step, each with rows of its own, that stay equal bit by bit.

A step is cut where its gradients are done. Each replica runs the first half on its rows; then gradients (still scaled,
float32), new running statistics, loss and metrics go round once, in one flat float32 bucket; then each runs the second
half on the mean. So the finite test sees what all replicas share, and all of them skip, or step, alike: TensorFlow's
rule for replicas (a step counts as finite only if it is so on each), without a second exchange.

What carries the bucket is a `Replicas`; `join_replicas` makes one of torch.distributed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from onnx import NodeProto
from onnx.helper import make_tensor_value_info

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.graphs import names_read
from amp_rewrite.ir.view import View
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.step.update import REGION

TIMEOUT = 300.0
"""Seconds that a replica waits for the others, unless told otherwise."""


@runtime_checkable
class Replicas(Protocol):
    """The processes that train together, seen from one of them: number `rank` of `world`, counted from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def total(self, bucket: Array) -> Array:
        """The sum of the float32 vectors that all replicas give: the same bits on each. `bucket` may be written over.

        TrainingError if not all of them give theirs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One replica, which waits for nobody."""

    rank: int = 0
    world: int = 1

    def total(self, bucket: Array) -> Array:
        return bucket


@dataclass(frozen=True, slots=True)
class TorchReplicas:
    """The replicas of torch.distributed's process group, which has been joined. `device`: where buckets are added."""

    rank: int
    world: int
    device: str
    timeout: float

    def total(self, bucket: Array) -> Array:
        import torch
        import torch.distributed

        carried = torch.from_numpy(bucket).to(self.device)
        try:
            torch.distributed.all_reduce(carried)
        except RuntimeError as cause:  # of torch's own kinds too: all are RuntimeErrors
            raise TrainingError(
                f"replica {self.rank} of {self.world} has no answer from the others (it waits {self.timeout:g} s): one"
                " has ended, or has fewer batches; start all of them again, each with the last checkpoint"
            ) from cause
        found: Array = carried.cpu().numpy()
        return found


@contextmanager
def join_replicas(backend: str | None = None, *, timeout: float = TIMEOUT) -> Iterator[Replicas]:
    """The replicas that this process was started with; `torchrun --nproc-per-node 2 train.py` starts two.

    A process that was started by itself is `Alone`. `backend`: "gloo" or "nccl"; by default nccl where PyTorch has a
    GPU, else gloo. Who has no answer for `timeout` seconds gives up with an error, and none waits for ever.

    TrainingError where PyTorch is missing, a replica does not turn up, or one sees more GPUs than its own.
    """
    if "WORLD_SIZE" not in os.environ:
        yield Alone()
        return
    torch = _torch()
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(chosen, torch.cuda.device_count())
    try:
        torch.distributed.init_process_group(chosen, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as cause:
        said = str(cause).splitlines()[0]
        raise TrainingError(f"the replicas did not come together: {said}; start all of them with torchrun") from cause
    try:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        yield TorchReplicas(rank, world, device, timeout)
    finally:
        torch.distributed.destroy_process_group()


def _torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as cause:
        raise TrainingError(
            "replicas talk through torch.distributed, and PyTorch is missing; pip install 'amp-rewrite[parallel]'"
        ) from cause
    return torch


def _device(backend: str, gpus: int) -> str:
    """Where the buckets of a backend lie. TrainingError for nccl in a process that sees no GPU, or several."""
    if backend != "nccl":
        return "cpu"
    if gpus != 1:
        raise TrainingError(
            f"nccl takes one GPU for each process, and this one sees {gpus}; set CUDA_VISIBLE_DEVICES to its own"
            " (LOCAL_RANK), or use the backend gloo"
        )
    return "cuda:0"


def averaged(replicas: Replicas, arrays: Sequence[Array | None], rows: int = 1) -> list[Array | None]:
    """The means over all replicas, each counted by its `rows`; for loops of one's own. None stays None.

    Average gradients before the loss scale sees them (`LossScaleOptimizer.apply_gradients`), so that all replicas
    decide alike. Float32, in one exchange.
    """
    given = [np.asarray(a, np.float32) for a in arrays if a is not None]
    ends = np.cumsum([a.size for a in given])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is meant to travel
        bucket = np.empty(sum(a.size for a in given) + 1, np.float32)
        for array, end in zip(given, ends, strict=True):
            np.multiply(array.ravel(), np.float32(rows), out=bucket[end - array.size : end])
        bucket[-1] = rows
        total = replicas.total(bucket)
        mean = total[:-1] / total[-1]
    means = iter([mean[end - a.size : end].reshape(a.shape) for a, end in zip(given, ends, strict=True)])
    return [None if a is None else next(means) for a in arrays]


def shard(batches: Iterable[Mapping[str, Array]], replicas: Replicas) -> Iterator[dict[str, Array]]:
    """Of each batch the rows of this replica: a part of about the same size for each, in their order.

    TrainingError for a batch with fewer rows than there are replicas.
    """
    for number, batch in enumerate(batches):
        mine = {n: np.array_split(a, replicas.world)[replicas.rank] if a.ndim else a for n, a in batch.items()}
        if min((len(a) for a in batch.values() if a.ndim), default=replicas.world) < replicas.world:
            raise TrainingError(
                f"batch {number} has fewer rows than there are replicas ({replicas.world}); make it larger"
            )
        yield mine


class DataParallelTrainer(Trainer):
    """A `Trainer` that is one of several: each `fit`s rows of its own, and all have the same state after each step.

    Loss and metrics in a History are means over all replicas, by rows; gradients too, so that the step is that of
    the joined batch if its loss is a mean over rows. Running statistics are means of those of the replicas, which
    normalize each by its own rows. `evaluate` looks at the data that it is given here. `save` writes on replica 0
    alone, and returns when it has on any. With micro-batches there is an exchange for each.

    TrainingError for what is no `Replicas`, replicas that begin with different states, and a replica that is gone.
    """

    def __init__(self, step: TrainingStep, replicas: Replicas, **options: Any) -> None:
        check_strategy(replicas)
        self.replicas = replicas
        super().__init__(step, **options)
        self._check_same()

    def _opened(self) -> Exchange:
        return Exchange.of(self._model, self.step, self.replicas, **self._options)

    def save(self, path: str | Path) -> None:
        if self.replicas.rank == 0:
            super().save(path)
        self._check_same()

    def load(self, path: str | Path) -> None:
        super().load(path)
        self._check_same()

    def _check_same(self) -> None:
        """TrainingError unless all replicas have the same step and state; also waits for all of them."""
        digest = hashlib.sha256(self.step.model.proto.SerializeToString(deterministic=True))
        for _, array in sorted(self._views().items()):
            digest.update(array.tobytes())
        bits = np.unpackbits(np.frombuffer(digest.digest(), np.uint8)).astype(np.float32)
        sums = self.replicas.total(bits)
        if ((sums != 0) & (sums != self.replicas.world)).any():  # all of them see that alike, and none goes on
            raise TrainingError(
                f"replica {self.replicas.rank} of {self.replicas.world}: the replicas differ in step or state; make"
                " all of them from the same model and options, or load the same checkpoint"
            )


def check_strategy(strategy: object) -> None:
    """TrainingError unless replicas are told by it: what TensorFlow refuses too, and its own objects.

    TensorFlow scales losses only under strategies that keep a copy of each variable on each replica.
    """
    if isinstance(strategy, Replicas):
        return
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    known = next((reason for part, reason in _REFUSED.items() if part in name), None)
    raise TrainingError(f"{name!r} cannot train a step: {known or 'it is no Replicas; use join_replicas()'}")


_MIRRORED = "join_replicas() does what it does, through torch.distributed"
_REFUSED = {
    "TPU": "TPUs compute in bfloat16, which needs no loss scale; remove the loss scale and train with their own tools",
    "CentralStorage": "it keeps one copy of each parameter for all replicas; use join_replicas(), one copy on each",
    "ParameterServer": "its replicas step at different times, so they cannot skip together; use join_replicas()",
    "FullyShardedDataParallel": "it splits parameters among replicas; use join_replicas(), a copy on each",
    "FSDP": "it splits parameters among replicas; use join_replicas(), a copy on each",
    "Mirrored": _MIRRORED,
    "CollectiveAllReduce": _MIRRORED,
    "OneDevice": "it is a Trainer's; leave it out",
    "DistributedDataParallel": _MIRRORED,
}


# -- the two halves of a step ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Exchange:
    """A step in two halves with the exchange between them; `run` takes and gives what the whole step does.

    The state stays where the halves run; what crosses goes over the host.
    """

    gradients: BufferedRunner
    apply: BufferedRunner
    crossing: tuple[str, ...]
    told: tuple[str, ...]
    batch: tuple[str, ...]
    replicas: Replicas

    @classmethod
    def of(cls, model: Model, step: TrainingStep, replicas: Replicas, **options: Any) -> Exchange:
        """`model` is that of the step, or its emulation; `options` are those of `Runner.open`."""
        halves, told = cut(model), (step.loss, *step.metrics)
        first, second = (Runner.open(half, **options) for half in (halves.gradients, halves.apply))
        buffer = second.double_buffer({v.input: v.initial for v in step.state})
        given = tuple(dict.fromkeys((*told, *halves.crossing)))
        successors = {v.input: v.output for v in step.state}
        return cls(
            first.buffered(buffer, {}, given),
            second.buffered(buffer, successors, (step.finite, step.applied)),
            halves.crossing,
            told,
            step.batch,
            replicas,
        )

    @property
    def provider(self) -> str:
        return self.gradients.provider

    @property
    def buffer(self) -> DoubleBuffer:
        return self.apply.buffer

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """What the step tells, the same on all replicas."""
        local = self.gradients.run(side, _taken(feeds, self.gradients))
        rows = max((np.shape(feeds[n])[0] for n in self.batch if np.ndim(feeds[n])), default=1)
        means = averaged(self.replicas, list(local.values()), rows)
        shared = {name: mean for name, mean in zip(local, means, strict=True) if mean is not None}
        flags = self.apply.run(side, _taken({**feeds, **shared}, self.apply))
        return {**flags, **{name: shared[name] for name in self.told}}


def _taken(feeds: Mapping[str, Array], runner: BufferedRunner) -> dict[str, Array]:
    return {name: array for name, array in feeds.items() if name in runner.inputs}


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A step in two models. `crossing`: the float32 outputs of `gradients` that are inputs of `apply`."""

    gradients: Model
    apply: Model
    crossing: tuple[str, ...]


def cut(model: Model) -> Halves:
    """A step's model in two: up to its gradients, and its update. Run one after the other they give the same bits.

    TrainingError for a model that is no step, or whose halves hang together by more than float32 values.
    """
    graph = model.proto.graph
    last = [n for n in graph.node if n.name.startswith(f"{REGION}/")]
    first = [n for n in graph.node if not n.name.startswith(f"{REGION}/")]
    made = {o for n in last for o in n.output}
    back = next((name for name in names_read(first) if name in made), None)
    if not last or back is not None:
        what = f"{back!r} of the update is read by the backward pass" if last else f"no node is named {REGION}/…"
        raise TrainingError(f"the model cannot be cut into gradients and update: {what}; give a step's model")
    wanted = dict.fromkeys(name for name in names_read(last) if name not in made)
    constants = [n for n in first if n.op_type == "Constant" and n.output[0] in wanted]
    results = {o for n in first for o in n.output} - {n.output[0] for n in constants}
    crossing = tuple(name for name in wanted if name in results)
    _check_float32(model, crossing)
    told = [v.name for v in graph.output if v.name not in made]
    kept = [v.name for v in graph.output if v.name in made]
    return Halves(
        _half(model, first, (), [*told, *(name for name in crossing if name not in told)]),
        _half(model, [*constants, *last], crossing, kept),
        crossing,
    )


def _check_float32(model: Model, crossing: Sequence[str]) -> None:
    view = View.of(model)
    types = {v.name: view.dtype(v.id) for v in view.values if v.name in crossing}
    strange = next((name for name in crossing if types[name] is not DType.FLOAT), None)
    if strange is not None:
        raise TrainingError(f"the update reads {strange!r}, which is no float32, so no mean of it can be taken")


def _half(model: Model, nodes: Sequence[NodeProto], given: Sequence[str], outputs: Sequence[str]) -> Model:
    """A model of some nodes of another: with the inputs and initializers that they read, and `given` ones."""
    graph = model.proto.graph
    read = set(names_read(nodes))
    declared = {v.name: v for v in graph.output}
    proto = clone(model.proto)
    for part in ("node", "input", "output", "value_info", "initializer", "sparse_initializer"):
        proto.graph.ClearField(part)
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(v for v in graph.input if v.name in read)
    proto.graph.input.extend(make_tensor_value_info(name, DType.FLOAT.code, None) for name in given)
    proto.graph.output.extend(
        declared.get(name) or make_tensor_value_info(name, DType.FLOAT.code, None) for name in outputs
    )
    proto.graph.initializer.extend(t for t in graph.initializer if t.name in read)
    proto.graph.sparse_initializer.extend(s for s in graph.sparse_initializer if s.values.name in read)
    return replace(model, proto=proto)
