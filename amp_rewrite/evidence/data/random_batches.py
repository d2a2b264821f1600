"""Random batches for a model, with shapes and ranges for its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, advice, spelled
from amp_rewrite.evidence.data.sources import LIMIT, Raw, Source, short
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.sizes import MOST_AXES
from amp_rewrite.runtime.ports import Port

_DEFAULT_INTS = (0, 2)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Random batches: the arguments of `Feed.randomly`, and three more.

    `scale`: the deviation of floats. `free`: the size of free dimensions whose names say nothing; None: `shapes` must
    give it. `limit`: the largest number of bytes of an array, counted as float64.
    """

    batches: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    int_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seed: int = 0
    scale: float = 1.0
    free: int | None = None
    limit: int = LIMIT


def drawn(ports: Sequence[Port], asked: Drawing) -> tuple[str, Source]:
    """Return the origin of random batches, and their source."""
    if asked.batches < 1:
        raise FeedError(f"{asked.batches} random batches requested; request at least one")
    if asked.seed < 0:
        raise FeedError(f"the seed {asked.seed} is negative; use a whole number of 0 or more")
    assumed = dict[str, int]()
    guessed = {port.name: _assumed(port, assumed, asked.free) for port in ports if port.name not in asked.shapes}
    shapes = {**asked.shapes, **{name: shape for name, shape in guessed.items() if shape is not None}}
    shaped = _drawn_shapes(ports, shapes, asked.limit)
    _check_ranges(ports, asked.int_ranges)

    def source() -> Iterator[Raw]:
        generator = np.random.default_rng(asked.seed)
        for _ in range(asked.batches):
            bounds = {p.name: asked.int_ranges.get(p.name, _DEFAULT_INTS) for p in ports}
            yield {p.name: _drawn(generator, p, shaped[p.name], bounds[p.name], asked.scale) for p in ports}

    stated = [f"random, seed {asked.seed}", *([] if asked.scale == 1 else [f"deviation {asked.scale:g}"])]
    return ", ".join((*stated, *(f"{name} = {size}" for name, size in assumed.items()))), source


def _drawn_shapes(ports: Sequence[Port], chosen: Mapping[str, Sequence[int]], limit: int) -> dict[str, tuple[int, ...]]:
    _check_known(chosen, ports, "shape")
    shapes = {}
    for port in ports:
        drawable = port.dtype not in (None, DType.STRING) and (port.dtype.floating or port.dtype.numpy.kind in "biu")
        if port.container != TENSOR or not drawable:
            what = f"{port.container}({port.dtype.spelling if port.dtype else 'unknown'})"
            raise FeedError(f"no random data for input {port.name!r}, which is {what}; give data for it")
        shape = chosen.get(port.name, port.shape)
        stated = "no shape" if port.shape is None else f"the shape {port.dims}"
        sizes = tuple(dim for dim in shape or () if isinstance(dim, (int, np.integer)))
        if shape is None or len(sizes) != len(shape):
            example = tuple(dim if isinstance(dim, int) else 64 for dim in port.shape or (None, None))
            words = spelled("shapes", {port.name: example}, option=f"shape {port.name}={','.join(map(str, example))}")
            raise FeedError(f"input {port.name!r} has {stated}; give all sizes, as in {words}")
        if not port.admits(sizes) or any(size < 0 for size in sizes):
            raise FeedError(f"the shape {list(sizes)} does not fit input {port.name!r}, which has {stated}")
        if len(sizes) > MOST_AXES or math.prod(max(1, size) for size in sizes) * 8 > limit:
            most = f"at most {MOST_AXES} axes and {limit} bytes"
            raise FeedError(f"the shape {list(sizes)} of input {port.name!r} is too large: {most}")
        shapes[port.name] = sizes
    return shapes


_USUAL = {
    1: ("batch", "batch_size", "bs", "n", "b"),
    16: ("sequence", "sequence_length", "seq", "seq_len", "length", "len", "tokens", "time", "frames", "t", "s"),
    64: ("height", "width", "h", "w"),
}
"""Usual sizes, and the names of dimensions that get them."""


def _assumed(port: Port, assumed: dict[str, int], free: int | None) -> tuple[int, ...] | None:
    """Return the shape of an input with usual sizes in place of free dimensions, and add these to `assumed`.

    The first axis is taken for the batch unless its name says otherwise. None if a dimension says nothing.
    """
    sizes, own = [], dict[str, int]()
    for axis, dim in enumerate(port.shape or ()):
        if isinstance(dim, int):
            sizes.append(dim)
            continue
        word = (dim or "").lower()
        size = next((size for size, names in _USUAL.items() if word in names), 1 if axis == 0 else free)
        if size is None:
            return None
        own[short(dim)[1:-1] if dim else f"axis {axis} of {short(port.name)[1:-1]}"] = size
        sizes.append(size)
    assumed.update(own)
    return tuple(sizes) if port.shape is not None else None


def _check_ranges(ports: Sequence[Port], ranges: Mapping[str, tuple[int, int]]) -> None:
    _check_known(ranges, ports, "range")
    kinds = {port.name: port.dtype.numpy for port in ports if port.dtype is not None}
    for name, (low, high) in ranges.items():
        if kinds[name].kind not in "iu":
            raise FeedError(f"a range of integers is given for input {name!r}, which is {kinds[name]}; leave it out")
        bounds = np.iinfo(kinds[name])
        if not bounds.min <= low < high <= bounds.max + 1:
            raise FeedError(f"the int range {low},{high} of input {name!r} is empty or does not fit {kinds[name]}")


def _check_known(names: Iterable[str], ports: Sequence[Port], what: str) -> None:
    known = [port.name for port in ports]
    for name in names:
        if name not in known:
            hint = advice(name, known, f"the inputs are {', '.join(map(repr, known)) or 'none'}")
            raise FeedError(f"a {what} is given for {short(name)}, which is not an input; {hint}")


def _drawn(
    generator: np.random.Generator, port: Port, shape: tuple[int, ...], bounds: tuple[int, int], scale: float
) -> Array:
    assert port.dtype is not None
    dtype = port.dtype.numpy
    if port.dtype is DType.BOOL:
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(*bounds, shape, dtype=dtype)
    return (generator.standard_normal(shape) * scale).astype(dtype)


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Parse shapes by input name from texts such as "input=1,128"; "input=" is the shape of a scalar."""
    return {name: tuple(numbers) for name, numbers in (_parsed(text, "shape", "input=1,128") for text in texts)}


def parse_int_ranges(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parse ranges by input name from texts such as "input_ids=0,30522"."""
    ranges = {}
    for text in texts:
        name, numbers = _parsed(text, "int range", "input_ids=0,30522")
        if len(numbers) != 2:
            raise FeedError(f"the int range {text!r} is not of the form input_ids=0,30522")
        ranges[name] = (numbers[0], numbers[1])
    return ranges


def _parsed(text: str, kind: str, example: str) -> tuple[str, list[int]]:
    name, equals, written = text.rpartition("=")
    try:
        numbers = [int(part) for part in written.split(",")] if written.strip() else []
    except ValueError:
        numbers = None
    if not name or not equals or numbers is None:
        raise FeedError(f"the {kind} {text!r} is not of the form {example}")
    return name, numbers
