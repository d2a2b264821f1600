"""Data-parallel training: replicas, averaging of their gradients, and sharding of batches.

Each replica computes the gradients of its own rows. One all-reduce averages them before the finite test,
so all replicas see the same bits and skip the same steps, as in TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import checked_arguments, quoted, to_array

TIMEOUT = 300.0
"""Default number of seconds a replica waits for the others."""


@runtime_checkable
class Replicas(Protocol):
    """The processes of a training run, as seen by one of them: number `rank` of `world`."""

    @property
    def rank(self) -> int:
        """Number of this process, starting at 0."""

    @property
    def world(self) -> int:
        """Number of processes."""

    def total(self, bucket: Array) -> Array:
        """Sum a float32 vector over all replicas, with the same bits on each; `bucket` may be overwritten.

        Raises:
            TrainingError: a replica does not respond.
        """


@dataclass(frozen=True, slots=True)
class SingleReplica:
    """The only replica of a training run."""

    rank: int = 0
    world: int = 1

    def total(self, bucket: Array) -> Array:
        return bucket


@dataclass(frozen=True, slots=True)
class TorchReplicas:
    """Replicas of torch.distributed's current process group. `device`: the device for the sums."""

    rank: int
    world: int
    device: str
    timeout: float

    def total(self, bucket: Array) -> Array:
        import torch
        import torch.distributed

        tensor = torch.from_numpy(bucket).to(self.device)
        try:
            torch.distributed.all_reduce(tensor)
        except RuntimeError as cause:  # torch's own errors are RuntimeErrors
            raise TrainingError(
                f"replica {self.rank} of {self.world} got no answer from the others (timeout {self.timeout:g} s): one"
                " has exited, or has fewer batches; restart all replicas from the last checkpoint"
            ) from cause
        return np.asarray(tensor.cpu().numpy())


@contextmanager
def join_replicas(backend: str | None = None, *, timeout: float = TIMEOUT) -> Iterator[Replicas]:
    """Join the other replicas; `torchrun --nproc-per-node 2 train.py` starts two.

    Without torchrun, the process is a `SingleReplica`.

    Args:
        backend: "gloo" or "nccl"; by default nccl if PyTorch has a GPU, otherwise gloo.
        timeout: seconds after which a waiting replica raises an error.

    Returns:
        A context manager that yields the replicas.

    Raises:
        TrainingError: PyTorch is missing, a replica does not join, or a process with nccl does not see exactly one GPU.

    Example:
        >>> from amp_rewrite.train import join_replicas
        >>> with join_replicas() as replicas:
        ...     replicas.rank, replicas.world
        (0, 1)
    """
    if "WORLD_SIZE" not in os.environ:
        yield SingleReplica()
        return
    try:
        import torch
        import torch.distributed
    except ImportError as cause:
        raise TrainingError(
            "replicas need torch.distributed, but PyTorch is not installed; pip install torch"
        ) from cause
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(backend, torch.cuda.device_count())
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as cause:
        reason = str(cause).splitlines()[0]
        raise TrainingError(f"the replicas could not connect: {reason}; start all of them with torchrun") from cause
    try:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        yield TorchReplicas(rank, world, device, timeout)
    finally:
        torch.distributed.destroy_process_group()


def _device(backend: str, gpus: int) -> str:
    if backend != "nccl":
        return "cpu"
    if gpus != 1:
        raise TrainingError(
            f"nccl needs one GPU per process, but this process sees {gpus}; set CUDA_VISIBLE_DEVICES to its"
            " LOCAL_RANK, or use the gloo backend"
        )
    return "cuda:0"


@checked_arguments()
def averaged(replicas: Replicas, arrays: Sequence[Array | None], rows: int = 1) -> list[Array | None]:
    """Average arrays over all replicas in one exchange, for custom loops.

    Average gradients before they reach the loss scale (`LossScaleOptimizer.apply_gradients`), so that all replicas
    make the same decision.

    Args:
        replicas: the replicas.
        arrays: one array per variable; None is preserved.
        rows: number of rows of this replica, as its weight.

    Returns:
        The float32 means, with the shapes of `arrays`.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import averaged, join_replicas
        >>> with join_replicas() as replicas:
        ...     averaged(replicas, [np.ones(2, np.float32), None])
        [array([1., 1.], dtype=float32), None]
    """
    present = [np.asarray(a, np.float32) for a in arrays if a is not None]
    ends = np.cumsum([a.size for a in present])
    with np.errstate(over="ignore", invalid="ignore"):  # nonfinite values must reach all replicas
        bucket = np.empty(sum(a.size for a in present) + 1, np.float32)
        for array, end in zip(present, ends, strict=True):
            np.multiply(array.ravel(), np.float32(rows), out=bucket[end - array.size : end])
        bucket[-1] = rows
        total = replicas.total(bucket)
        mean = total[:-1] / total[-1]
    means = iter(np.split(mean, ends[:-1]))
    return [None if a is None else next(means).reshape(np.shape(a)) for a in arrays]


def shard(batches: Iterable[Mapping[str, Array]], replicas: Replicas) -> Iterator[dict[str, Array]]:
    """Yield this replica's rows of each batch: contiguous parts of nearly equal size, in rank order.

    Args:
        batches: mappings from input names to arrays.
        replicas: the replicas.

    Returns:
        An iterator of batches.

    Raises:
        TrainingError: a batch has fewer rows than replicas.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import join_replicas, shard
        >>> with join_replicas() as replicas:
        ...     [len(batch["x"]) for batch in shard([{"x": np.ones(4)}], replicas)]
        [4]
    """
    if not isinstance(replicas, Replicas) or not isinstance(batches, Iterable):
        raise TrainingError(f"shard takes batches and replicas, not {quoted(batches)} and {quoted(replicas)}")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TrainingError(f"batch {number} must be a mapping from input names to arrays, not {quoted(batch)}")
        arrays = {name: to_array(value, f"{name!r} of batch {number}") for name, value in batch.items()}
        if min((len(a) for a in arrays.values() if a.ndim), default=replicas.world) < replicas.world:
            raise TrainingError(
                f"batch {number} has fewer rows than there are replicas ({replicas.world}); use larger batches"
            )
        yield {n: np.array_split(a, replicas.world)[replicas.rank] if a.ndim else a for n, a in arrays.items()}


def strategy_supports_loss_scaling(strategy: object = None) -> bool:
    """Return True if loss scaling works with a strategy: one process, or replicas with copies of all variables.

    Args:
        strategy: any object, or the name of its class; None for training without a strategy.

    Returns:
        True if loss scaling works.

    Example:
        >>> from amp_rewrite.train import strategy_supports_loss_scaling
        >>> strategy_supports_loss_scaling(), strategy_supports_loss_scaling("TPUStrategy")
        (True, False)
    """
    if strategy is None or isinstance(strategy, Replicas):
        return True
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return any(part in name for part in _REPLICATED)


_REPLICATED = ("Mirrored", "CollectiveAllReduce", "OneDevice", "DistributedDataParallel", "Default")
"""Substrings of the names of strategies with a copy of each variable on each replica."""
