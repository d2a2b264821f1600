"""Batches for a model: the user's data, checked against the model's inputs, or random data.

Each array is accepted unchanged, cast to the input's type (integers only if no value changes), or rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, nearest, spelled
from amp_rewrite.evidence.data.feedback import Feedback
from amp_rewrite.evidence.data.sources import Drawing, Raw, Source, as_array, drawn, named, short, source_of
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import shortened
from amp_rewrite.runtime.ports import Port, input_ports

Batch = Mapping[str, Array]

_MAX_NAMES = 8  # names in an error
_NO_BATCH = "the data contains no batches; give at least one"


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches for one model, iterable any number of times; each batch is checked as it is read.

    With feedback, there is one batch per run; every run of a sequence except the first gets the states of the
    previous run.

    Attributes:
        origin: description of the source and the feedback, for reports.
        random: True for random data.
        feedback: outputs that become inputs of the next run, or None.
        notes: casts of the first batch, and arrays without an input.

    Example:
        >>> import amp_rewrite
        >>> model = amp_rewrite.Model.load("model.onnx")
        >>> [batch["image"].shape for batch in amp_rewrite.Feed.of("batches.npz", model)]
        [(64, 1, 8, 8)]
    """

    origin: str
    random: bool
    feedback: Feedback | None = None
    notes: tuple[str, ...] = ()
    _ports: tuple[Port, ...] = field(repr=False, default=())
    _source: Source = field(repr=False, default=tuple)  # type: ignore[assignment]
    _count: int | None = field(repr=False, default=None)
    _allow_nonfinite: bool = field(repr=False, default=False)
    _ignored: frozenset[str] = field(repr=False, default=frozenset())
    _checksum: int | None = field(repr=False, default=None)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch by input name, cast to the input types. Raise FeedError for an invalid batch."""
        number = -1
        for number, raw in enumerate(self._source()):
            batch = _checked(raw, self._ports, number, self._allow_nonfinite, self._ignored)[0]
            if number == 0 and self._checksum not in (None, _checksum(batch)):
                raise FeedError(
                    f"{self.origin}: a second pass returned different batches, but a search needs the same ones; turn"
                    " off shuffling and augmentation, and create a new array for each batch"
                )
            yield from [batch] if self.feedback is None else self.feedback.runs(number, batch)
        if number < 0:
            raise FeedError(f"{self.origin}: {_NO_BATCH}")

    def __len__(self) -> int:
        """Return the number of runs. For a function or an iterable without a length, this reads all batches once."""
        return self._counted * (self.feedback.steps or 1 if self.feedback else 1)

    def place(self, run: int) -> tuple[int, int | None]:
        """Return the index of a run's batch, and of its step if each batch has several."""
        return (run, None) if self.feedback is None else self.feedback.place(run)

    @cached_property
    def _counted(self) -> int:
        return self._count if self._count is not None else sum(1 for _ in self._source())

    @classmethod
    def of(
        cls,
        data: object,
        model: Model,
        *,
        allow_nonfinite: bool = False,
        allow_change: bool = False,
        extra_axes: Mapping[str, int] = MappingProxyType({}),
        feedback: Sequence[str] | str = (),
        steps: int | None = None,
    ) -> Feed:
        """Return the user's data as batches for a model.

        The data is one batch, an iterable of batches, a callable that returns a new iterable of batches at each call
        (such as a generator function), a Feed, or a path. A batch is a mapping from input names to arrays, an array
        (for the only input), or a tuple of arrays in the order of the inputs without a default; further arrays, such
        as labels, are ignored. An array is a numpy array, a torch tensor on any device, or an object that numpy
        converts to an array. A list of arrays is a list of batches. An iterable, such as a DataLoader, must return the
        same batches in each pass. A path names

        - a .npz file with the names of the inputs (one batch), or with `0/input`, `1/input` … (several batches);
        - a folder of .npz files, in natural order.

        Integers are cast if no value can change (int32 to int64), and floats are cast to the float type of the input;
        `notes` lists these casts. Arrays without an input, such as labels, are ignored with a note if the first batch
        contains them, it feeds every input, and their names do not resemble an input's name. The first batch is checked
        immediately, the others as they are read.

        Args:
            data: the data.
            model: the model to feed.
            allow_nonfinite: accept NaN and infinity.
            allow_change: accept different batches in each pass, as from a shuffling DataLoader.
            extra_axes: by input name, an additional axis of size 1 that arrays may have; it is removed.
            feedback: outputs that become inputs of the next run, as in "hn=h" or "present.*=past.*"; the data may omit
                these inputs.
            steps: runs per batch if each batch is a sequence with feedback; None means that all batches form one
                sequence.

        Raises:
            FeedError: names, types or sizes do not fit, there are no batches, or a file is damaged.
        """
        ports = tuple(replace(port, extra=extra_axes.get(port.name)) for port in input_ports(model))
        back = Feedback.of(feedback, steps, model)
        if isinstance(data, Feed):
            origin = data.origin
            if data.feedback is not None:
                back, origin = back or data.feedback.for_model(model), origin.removesuffix(f", {data.feedback}")
            nonfinite = allow_nonfinite or data._allow_nonfinite
            feed = cls(origin, data.random, back, (), ports, data._source, data._count, nonfinite)
        else:
            origin, source, count = source_of(data, {port.name for port in ports})
            feed = cls(origin, False, back, (), ports, source, count, allow_nonfinite)
        feed = feed._with_checked_first()
        return replace(feed, _checksum=None) if allow_change else feed

    @classmethod
    def randomly(
        cls,
        model: Model,
        *,
        batches: int = 1,
        shapes: Mapping[str, Sequence[int]] | None = None,
        int_ranges: Mapping[str, tuple[int, int]] | None = None,
        seed: int = 0,
        feedback: Sequence[str] | str = (),
        steps: int | None = None,
    ) -> Feed:
        """Return random batches, determined by the seed and identical in each pass.

        Floats have a normal distribution with mean 0 and standard deviation 1. Integers are 0 or 1 by default, and
        booleans are uniform. Inputs with a default are not fed.

        Args:
            model: the model to feed.
            batches: number of batches.
            shapes: shapes of inputs by name; free dimensions of other inputs get default sizes, listed in `origin`.
            int_ranges: half-open ranges of integer inputs by name.
            seed: seed of the random numbers.
            feedback: as for `of`; a sequence begins with random states.
            steps: as for `of`.

        Raises:
            FeedError: an input has no known shape or is not a tensor of numbers, or an argument does not fit any input.
        """
        options = Drawing(batches, shapes or {}, int_ranges or {}, seed)
        return cls.drawn(model, options, Feedback.of(feedback, steps, model))

    @classmethod
    def drawn(cls, model: Model, options: Drawing, back: Feedback | None = None) -> Feed:
        """Return random batches as `randomly` does, with all options of a Drawing.

        Args:
            model: the model to feed.
            options: number, shapes and distribution of the batches.
            back: outputs that become inputs of the next run.

        Raises:
            FeedError: as for `randomly`.
        """
        ports = input_ports(model)
        origin, source = drawn([port for port in ports if port.required], options)
        return cls(origin, True, back, (), ports, source, options.batches)._with_checked_first()

    def _with_checked_first(self) -> Feed:
        """Check the first batch, and return the feed with its notes and checksum. Raise FeedError if it is invalid."""
        batches, back = self._source(), self.feedback
        first = next(batches, None)
        if first is None:
            raise FeedError(f"{self.origin}: {_NO_BATCH}")
        origin, ports = self.origin, self._ports
        if back is not None:
            origin = f"{origin}, {back}"
            ports = tuple(replace(p, required=p.required and p.name not in back.states) for p in ports)
            if back.steps is None and next(batches, None) is None:
                more = f"give several batches, or {spelled('steps', 100)} to run the batch 100 times"
                raise FeedError(f"{origin}: one batch is one run, so nothing is fed back; {more}")
        ignored = _ignored(first, ports)
        batch, notes = _checked(first, ports, 0, self._allow_nonfinite, ignored)
        if ignored:
            names = shortened([short(name) for name in sorted(ignored)], _MAX_NAMES)
            notes = (*notes, f"ignored, because no input has this name: {names}")
        if back is not None:
            next(back.runs(0, batch))
        return replace(self, origin=origin, notes=notes, _ports=ports, _ignored=ignored, _checksum=_checksum(batch))


def _ignored(first: object, ports: tuple[Port, ...]) -> frozenset[str]:
    """Return the names without an input, if the batch feeds every input and they do not resemble an input's name."""
    inputs = {port.name for port in ports}
    if not isinstance(first, Mapping) or not inputs <= first.keys():
        return frozenset()
    extra = frozenset(name for name in first if name not in inputs)
    return frozenset() if any(nearest(str(name), inputs) for name in extra) else extra


def _checksum(batch: Batch) -> int:
    checksum = 0
    for value in batch.values():
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            checksum = crc32(np.ascontiguousarray(value.reshape(-1)[:_CHECKSUM_ELEMENTS]).tobytes(), checksum)
    return checksum


_CHECKSUM_ELEMENTS = 4096
"""Number of elements of each array in the checksum of a batch."""


def _checked(
    raw: object, ports: tuple[Port, ...], number: int, allow_nonfinite: bool, ignored: Collection[str] = ()
) -> tuple[Batch, tuple[str, ...]]:
    """Return a batch cast to the input types, and notes on its casts. `ignored`: names to ignore."""
    place = f"batch {number}"
    raw, note = named(raw, ports, place)
    _check_names(raw, ports, place, ignored)
    batch, notes = {}, [note] if note else []
    for port in ports:
        name = port.name
        if name in raw:
            batch[name], note = _fitting(raw[name], port, f"input {name!r} of {place}", allow_nonfinite)
            notes += [f"{name}: {note}"] if note else []
    if batch and all(isinstance(value, np.ndarray) and not value.size for value in batch.values()):
        shapes = ", ".join(f"{name} {list(np.shape(value))}" for name, value in batch.items())
        raise FeedError(f"{place} has no elements: {shapes}; give at least one row")
    return batch, tuple(notes)


def _check_names(raw: Raw, ports: tuple[Port, ...], place: str, ignored: Collection[str]) -> None:
    known = [port.name for port in ports]
    for name in raw:
        if name not in known and name not in ignored:
            inputs = f"the input{'s' * (len(known) > 1)} {', '.join(map(repr, known))}" if known else "no inputs"
            unfed = [one for one in known if one not in raw]
            suggestion = nearest(str(name), unfed) or (unfed if len(unfed) == 1 else [])
            rename = f"rename it to {suggestion[0]!r}, or " if suggestion else ""
            raise FeedError(f"{place} has an array {short(str(name))}, but the model has {inputs}; {rename}drop it")
    required = [port.name for port in ports if port.required and not port.container.startswith("optional")]
    missing = [repr(name) for name in required if name not in raw]
    if missing:
        fact = f"{place} is missing input{'s' if len(missing) > 1 else ''} {shortened(missing, _MAX_NAMES)}"
        raise FeedError(f"{fact}; every batch needs {shortened(list(map(repr, required)), _MAX_NAMES)}")


def _fitting(value: object, port: Port, where: str, allow_nonfinite: bool) -> tuple[Any, str]:
    """Return a value cast to the type of an input, and a note on the cast. Only tensors are checked and cast."""
    if port.container != TENSOR:
        return value, ""
    array, note = _typed(port.without_extra(_as_array(value, where)), port, where)
    if not port.admits(array.shape):
        raise FeedError(f"{where} has the shape {list(array.shape)}, but the input takes {port.dims}; reshape it")
    floating = array.dtype.kind in "fc" or array.dtype == DType.BFLOAT16.numpy
    if floating and not allow_nonfinite and not np.isfinite(array).all():
        allowed = spelled("allow_nonfinite", True)
        fact = f"contains NaN or infinity{f' as {port.dtype.spelling}' if note and port.dtype else ''}"
        raise FeedError(f"{where} {fact}; give finite numbers in range, or allow others with {allowed}")
    return array, note


def _as_array(value: object, where: str) -> Array:
    try:
        array: Array = as_array(value)
    except (ValueError, TypeError, RuntimeError) as cause:
        raise FeedError(f"{where} cannot be converted to an array: {' '.join(str(cause).split())[:200]}") from cause
    if array.dtype.hasobject and not all(isinstance(item, (str, bytes)) for item in array.flat):
        raise FeedError(f"{where} contains Python objects; give an array of numbers")
    return array


def _typed(array: Array, port: Port, where: str) -> tuple[Array, str]:
    if port.dtype is None:
        return array, ""
    if port.dtype is DType.STRING:
        if array.dtype.kind not in "UO":
            raise FeedError(f"{where} is {array.dtype}, but the input takes strings; give an array of str")
        return array.astype(object), ""
    to, expected = port.dtype.numpy, port.dtype.spelling
    if port.dtype is DType.BFLOAT16 and array.dtype == np.dtype("V2"):  # numpy loads saved bfloat16 arrays as V2
        return array.view(to), ""
    native = array.dtype.newbyteorder("=")
    if native == to:
        return np.ascontiguousarray(array, to).reshape(array.shape), ""
    if port.dtype.floating:
        castable = native.kind == "f" or native == DType.BFLOAT16.numpy
    else:
        castable = native.kind in "iu" and to.kind in "iu" and np.can_cast(native, to, "safe")
    if not castable:
        raise FeedError(f"{where} is {native}, but the input takes {expected}; cast it with .astype({str(to)!r})")
    with np.errstate(all="ignore"):  # overflow becomes infinity, which is checked below
        return array.astype(to), f"{native} cast to {expected}"
