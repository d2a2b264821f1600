"""Batches for a model: those of the user, checked against the model's inputs, or random ones.

An array is passed on unchanged, cast if every value survives, or rejected with a message that says what to give.
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
from amp_rewrite.evidence.data.random_batches import Drawing, drawn
from amp_rewrite.evidence.data.sources import LIMIT, FileBatch, Raw, Source, as_array, named, short, source_of
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import shortened
from amp_rewrite.runtime.ports import Port, input_ports

Batch = Mapping[str, Array]

_SHOWN = 8  # names in an error
_NO_BATCH = "the data hold no batch; give at least one"


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches for one model, for any number of iterations; each batch is checked as it is read.

    With feedback there is one for each run, and a run after the first of a sequence gets states from the run before.

    Attributes:
        origin: their source in a report, and the feedback.
        random: True for random batches.
        notes: the casts of the first batch, and the arrays that no input takes, one sentence each.
        feedback: the outputs that are inputs of the next run; None without any.

    Example:
        >>> import amp_rewrite
        >>> model = amp_rewrite.Model.load("model.onnx")
        >>> [batch["image"].shape for batch in amp_rewrite.Feed.of("batches.npz", model)]
        [(64, 1, 8, 8)]
    """

    origin: str
    random: bool
    notes: tuple[str, ...]
    _ports: tuple[Port, ...] = field(repr=False)
    _allow_nonfinite: bool = field(repr=False)
    _source: Source = field(repr=False)
    _count: int | None = field(repr=False)
    _mark: int | None = field(repr=False)
    _ignored: frozenset[str] = field(repr=False, default=frozenset())
    feedback: Feedback | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch by input name, arrays in the input's type. Raise FeedError for an unfit one."""
        number = -1
        for number, raw in enumerate(self._source()):
            batch = _checked(raw, self._ports, number, self._allow_nonfinite, self._ignored)[0]
            if number == 0 and self._mark not in (None, _mark(batch)):
                raise FeedError(
                    f"{self.origin}: another pass gives other batches, and a search compares passes; turn shuffling and"
                    " random changes off, and make a new array for each batch"
                )
            yield from [batch] if self.feedback is None else self.feedback.runs(number, batch)
        if number < 0:
            raise FeedError(f"{self.origin}: {_NO_BATCH}")

    def __len__(self) -> int:
        """Return the number of batches; for a function or an iterable without a length, by reading all of them once."""
        return self._counted * (self.feedback.steps or 1 if self.feedback else 1)

    def place(self, run: int) -> tuple[int, int | None]:
        """Return the number of a run's batch, and of its step on it if each batch has several."""
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
        limit: int = LIMIT,
        feedback: Sequence[str] | str = (),
        steps: int | None = None,
    ) -> Feed:
        """Return the user's data as batches for a model.

        The data are one batch; an iterable of batches; a callable that gives a new one at each call, such as a
        generator function; a Feed; or a path. A batch is a mapping from input names to arrays, an array (for the only
        input), or a tuple of arrays in the order of the inputs that have no default; labels after those are left out.
        Arrays are those of numpy, tensors of torch on any device, and what converts to arrays. A list of arrays is a
        list of batches. The batches of a generator are kept in memory; other iterables, such as a DataLoader, must give
        the same batches in each pass. A path is

        - a .npz file whose names are the inputs' (one batch), or `0/input`, `1/input` … (several);
        - a .npy file, for a model of one input;
        - a folder of .npz files, in natural order, or of one `INPUT.npy` for each input (one batch).

        Arrays are cast if every value survives (int32 to int64), from float64 to float32, and from wider floats to the
        low type of an input; `notes` lists these casts. Arrays that no input takes, such as labels, are ignored with a
        UserWarning if the first batch has them, feeds every input, and no name resembles an input's. The first batch is
        checked at once, the others as they are read.

        Args:
            data: the data.
            model: the model that gets them.
            allow_nonfinite: accept NaN and infinity.
            allow_change: accept other batches in each pass, as of a DataLoader that shuffles.
            extra_axes: axes by input that arrays may have beyond its shape, if their size is 1; they are removed.
            limit: the largest number of bytes of a batch in a file.
            feedback: outputs that are inputs of the next run, as in "hn=h" or "present.*=past.*"; data may omit those.
            steps: with feedback, the runs on each batch, a sequence each; None: all batches are one sequence.

        Raises:
            FeedError: names, types or sizes do not fit, no batch is given, or a file is damaged; says what to give.
        """
        ports = tuple(replace(port, extra=extra_axes.get(port.name)) for port in input_ports(model))
        back = Feedback.of(feedback, steps, model)
        random = False
        if isinstance(data, Feed):
            origin, random, source, count = data.origin, data.random, data._source, data._count
            allow_nonfinite = allow_nonfinite or data._allow_nonfinite
            if data.feedback is not None:
                back, origin = back or data.feedback.on(model), origin.removesuffix(f", {data.feedback}")
        else:
            origin, source, count = source_of(data, ports, limit)
        feed = _checking(origin, random, _without_states(ports, back), allow_nonfinite, source, count, back)
        if feed._ignored and not isinstance(data, Feed):
            import warnings  # late: data seldom hold more than inputs

            warnings.warn(feed.notes[-1], UserWarning, stacklevel=2)
        return replace(feed, _mark=None) if allow_change else feed

    @classmethod
    def randomly(
        cls,
        model: Model,
        *,
        batches: int = 1,
        shapes: Mapping[str, Sequence[int]] | None = None,
        int_ranges: Mapping[str, tuple[int, int]] | None = None,
        seed: int = 0,
        scale: float = 1.0,
        free: int | None = None,
        limit: int = LIMIT,
        feedback: Sequence[str] | str = (),
        steps: int | None = None,
    ) -> Feed:
        """Return random batches, the same for the same seed in each pass.

        Floats are normal with mean 0; integers are 0 and 1 by default; booleans are uniform. Inputs
        with a default are not fed.

        Args:
            model: the model that gets them.
            batches: their number.
            shapes: those of inputs by name; otherwise free dimensions get usual sizes, which `origin` states.
            int_ranges: half-open ranges of integer inputs by name.
            seed: of the random numbers.
            scale: the deviation of floats.
            free: the size of free dimensions whose names say nothing; None: `shapes` must give it.
            limit: the largest number of bytes of an array, counted as float64.
            feedback: as `of` takes it; a sequence begins with random states.
            steps: as `of` takes them.

        Raises:
            FeedError: an input has no known shape or is not a tensor of numbers, or an argument fits no input.
        """
        ports = [port for port in input_ports(model) if port.required]
        asked = Drawing(batches, shapes or {}, int_ranges or {}, seed, scale, free, limit)
        origin, source = drawn(ports, asked)
        back = Feedback.of(feedback, steps, model)
        return _checking(origin, True, _without_states(input_ports(model), back), False, source, batches, back)


def _without_states(ports: tuple[Port, ...], back: Feedback | None) -> tuple[Port, ...]:
    return tuple(replace(port, required=False) if back and port.name in back.states else port for port in ports)


def _checking(
    origin: str,
    random: bool,
    ports: tuple[Port, ...],
    allow_nonfinite: bool,
    source: Source,
    count: int | None,
    back: Feedback | None,
) -> Feed:
    batches = source()
    first = next(batches, None)
    if first is None:
        raise FeedError(f"{origin}: {_NO_BATCH}")
    if back is not None:
        origin = f"{origin}, {back}"
        if back.steps is None and next(batches, None) is None:
            more = f"give several batches, or {spelled('steps', 100)} to run it 100 times"
            raise FeedError(f"{origin}: one batch is one run, and nothing is fed back; {more}")
    ignored = _ignored(first, ports)
    batch, notes = _checked(first, ports, 0, allow_nonfinite, ignored)
    if ignored:
        names = [short(name) for name in sorted(ignored)]
        them = "them" if len(names) > 1 else "it"
        notes = (*notes, f"ignored: {shortened(names, _SHOWN)}, because no input takes {them}")
    if back is not None:
        next(back.runs(0, batch))
    return Feed(origin, random, notes, ports, allow_nonfinite, source, count, _mark(batch), ignored, back)


def _ignored(first: object, ports: tuple[Port, ...]) -> frozenset[str]:
    """Names in a batch beyond those of the inputs, if every input is fed and no name resembles an input's."""
    known = {port.name for port in ports}
    if not isinstance(first, Mapping) or not known <= first.keys():
        return frozenset()
    extra = frozenset(name for name in first if name not in known)
    return frozenset() if any(nearest(str(name), known) for name in extra) else extra


def _mark(batch: Batch) -> int:
    mark = 0
    for value in batch.values():
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            mark = crc32(np.ascontiguousarray(value.reshape(-1)[:_MARKED]).tobytes(), mark)
    return mark


_MARKED = 4096
"""Elements of an array by which a batch is recognized."""


def _checked(
    raw: object, ports: tuple[Port, ...], number: int, allow_nonfinite: bool, ignored: Collection[str] = ()
) -> tuple[Batch, tuple[str, ...]]:
    """Return a batch in the types of the inputs, and notes of its casts. `ignored`: names of no input."""
    raw, note = named(raw, ports, f"batch {number}")
    known = {port.name: port for port in ports}
    for name in raw:
        if name not in known and name not in ignored:
            inputs = f"{'input is' if len(known) == 1 else 'inputs are'} {', '.join(map(repr, known)) or 'none'}"
            unfed = [port.name for port in ports if port.name not in raw]
            meant = nearest(str(name), unfed) or (unfed if len(unfed) == 1 else [])
            rename = f"rename it to {meant[0]!r}, or " if meant else ""
            fact = f"{_batch(number, raw)} has an array {short(str(name))}, but the model's {inputs}"
            raise FeedError(f"{fact}; {rename}drop it")
    required = [port.name for port in ports if port.required and not port.container.startswith("optional")]
    missing = [repr(name) for name in required if name not in raw]
    if missing:
        fact = f"{_batch(number, raw)} lacks input{'s' if len(missing) > 1 else ''} {shortened(missing, _SHOWN)}"
        raise FeedError(f"{fact}; every batch needs {shortened(list(map(repr, required)), _SHOWN)}")
    batch, notes = {}, [note] if note else []
    for name, port in known.items():
        if name in raw:
            where = f"input {name!r} of {_batch(number, raw)}"
            batch[name], note = _fitting(raw[name], port, where, allow_nonfinite)
            notes += [f"{name}: {note}"] if note else []
    if batch and not any(_elements(value) for value in batch.values()):
        shapes = ", ".join(f"{name} {list(np.shape(value))}" for name, value in batch.items())
        raise FeedError(f"{_batch(number, raw)} has no elements: {shapes}; give at least one row")
    return batch, tuple(notes)


def _batch(number: int, raw: Raw) -> str:
    return f"batch {number} ({short(raw.file)[1:-1]})" if isinstance(raw, FileBatch) else f"batch {number}"


def _elements(value: Any) -> int:
    return sum(map(_elements, value)) if isinstance(value, list) else 0 if value is None else int(np.size(value))


def _fitting(value: object, port: Port, where: str, allow_nonfinite: bool) -> tuple[Any, str]:
    if port.container == TENSOR:
        array, note = _typed(port.without_extra(_as_array(value, where)), port, where)
        if port.shape is not None and not port.admits(array.shape):
            raise FeedError(f"{where} has the shape {list(array.shape)}; the input takes {port.dims}")
        _check_finite(array, value, where, allow_nonfinite)
        return array, note
    if value is None and port.container.startswith("optional"):
        return None, ""
    element = replace(port, container=TENSOR)
    if "seq" in port.container:
        if not isinstance(value, (list, tuple)):
            raise FeedError(f"{where} is a sequence; give a list of arrays, not {type(value).__qualname__}")
        parts = [_fitting(part, element, f"{where}, at {at},", allow_nonfinite) for at, part in enumerate(value)]
        return [part for part, _ in parts], next((note for _, note in parts if note), "")
    return _fitting(value, element, where, allow_nonfinite) if port.container == "optional" else (value, "")


def _as_array(value: object, where: str) -> Array:
    if np.ma.is_masked(value):
        raise FeedError(f"{where} has masked values, which a model cannot leave out; give numbers for them (filled)")
    try:
        array: Array = as_array(value)
    except (ValueError, TypeError, RuntimeError) as cause:
        raise FeedError(f"{where} cannot be made an array: {' '.join(str(cause).split())[:200]}") from cause
    if array.dtype.hasobject and not all(isinstance(item, (str, bytes)) for item in array.flat):
        raise FeedError(f"{where} is {type(value).__qualname__} of objects; give an array of numbers")
    return array


def _typed(array: Array, port: Port, where: str) -> tuple[Array, str]:
    if port.dtype is None:
        return array, ""
    if port.dtype is DType.STRING:
        if array.dtype.kind not in "UO":
            raise FeedError(f"{where} is {array.dtype}, and the input takes strings; give an array of str")
        return array.astype(object), ""
    to, taken = port.dtype.numpy, port.dtype.spelling
    if port.dtype is DType.BFLOAT16 and array.dtype == np.dtype("V2"):  # numpy reads its own bfloat16 files back as V2
        return array.view(to), ""
    native = array.dtype.newbyteorder("=")
    if native == to:
        return np.ascontiguousarray(array, to).reshape(array.shape), ""
    if not _castable(native, port.dtype):
        raise FeedError(f"{where} is {native}, and the input takes {taken}; cast it with .astype({str(to)!r})")
    with np.errstate(all="ignore"):  # overflow becomes infinity, which is checked below
        return array.astype(to), f"{native} cast to {taken}"


def _castable(dtype: np.dtype[Any], to: DType) -> bool:
    if to.floating:
        return dtype.kind == "f" or dtype == DType.BFLOAT16.numpy
    return dtype.kind in "iu" and to.numpy.kind in "iu" and np.can_cast(dtype, to.numpy, "safe")


def _check_finite(array: Array, source: object, where: str, allow_nonfinite: bool) -> None:
    if allow_nonfinite or not (array.dtype.kind in "fc" or array.dtype == DType.BFLOAT16.numpy):
        return
    finite = np.isfinite(array)
    if finite.all():
        return
    original = as_array(source)
    at = tuple(int(i) for i in np.argwhere(~finite)[0])
    before, after = original[at], array[at]
    if array.dtype != original.dtype and np.isfinite(before):
        raise FeedError(f"{where} has {before} at {list(at)}, which is {after} in {array.dtype}; scale the data")
    allowed = spelled("allow_nonfinite", True)
    raise FeedError(f"{where} has {after} at {list(at)}; give finite numbers, or allow others with {allowed}")
