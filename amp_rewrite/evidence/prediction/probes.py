"""Probes: random signs on blocks of the outputs, and the errors of outputs that the probes tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.evidence.metric import Criterion, worse
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.view import View


class Probing(NamedTuple):
    """Probes of each batch, and the signs that each of them is run with."""

    probes: int
    repeats: int


FEWEST, FEW, MANY = Probing(2, 1), Probing(4, 1), Probing(16, 4)
"""Of a search in a large model, whose runs take time and whose trials correct the prediction; of one that is large or
searched; of a small model, whose adjoint model takes longer to build."""
_LARGE = 1 << 22
"""Numbers in the weights of a large model."""
_DRAWS = 4096
"""Draws of an error for small outputs: enough elements for a stable largest one."""
_EVEN = 0.02
"""Part of an error that is spread evenly over a probe, whatever the profile says."""


def probing(view: View, *, search: bool = False) -> Probing:
    """Return how a model is probed, alone or in a search. O(constants)."""
    tensors = (view.constant(value.id) for value in view.values)
    numbers = sum(math.prod(tensor.dims) for tensor in tensors if tensor is not None)
    return (MANY, FEW, FEWEST)[(numbers > _LARGE) + search]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start` to `stop` of a flat output in a batch, and the size 1/|y| of its signs."""

    batch: int
    output: str
    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Outputs:
    """The float32 outputs of the reference for one batch, and the probes that see them.

    Each probe has its own blocks: rows of one output (along its last axis), or several outputs if there are more of
    them than probes. `profile`: the squared error of each element if all ops are low, where it is known (`profiled`);
    within a probe, any error is spread as this one.
    """

    number: int
    values: Mapping[str, Array]
    probes: tuple[tuple[Block, ...], ...]
    profile: Mapping[str, Array] = field(default_factory=dict)
    _draws: dict[str, list[Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, number: int, values: Mapping[str, Array], probes: int) -> Outputs:
        """Return the outputs with at most so many probes, the largest outputs first."""
        wholes = [Block(number, name, 0, value.size, _weight(value)) for name, value in values.items()]
        if len(wholes) >= probes:
            parts = np.array_split(np.arange(len(wholes)), probes)
            return cls(number, values, tuple(tuple(wholes[i] for i in part) for part in parts))
        pieces = {block.output: 1 for block in wholes}
        for _ in range(probes - len(wholes)):
            largest = max(wholes, key=lambda block: block.size / pieces[block.output])
            pieces[largest.output] += 1
        cut = (part for block in wholes for part in _parts(block, pieces[block.output], row_of(values[block.output])))
        return cls(number, values, tuple((block,) for block in cut))

    def seeds(self, probe: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """Return signs on the blocks of a probe, zeros elsewhere; 0 where an output is not finite."""
        seeds = {name: np.zeros(value.size, np.float32) for name, value in self.values.items()}
        for block in self.probes[probe]:
            part = slice(block.start, block.stop)
            signs = rng.integers(0, 2, block.size) * 2 - 1
            finite = np.isfinite(self.values[block.output].reshape(-1)[part])
            seeds[block.output][part] = np.where(finite, signs * block.weight, 0.0)
        return {name: seed.reshape(self.values[name].shape) for name, seed in seeds.items()}

    def energies(self, results: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return the squared errors of other outputs, as the probes weigh them; inf if a finite value is lost."""
        energies = []
        for blocks in self.probes:
            total = 0.0
            for block in blocks:
                part = slice(block.start, block.stop)
                both = (side[block.output].reshape(-1)[part] for side in (self.values, results))
                expected, result = (side.astype(np.float64) for side in both)
                finite = np.isfinite(expected)
                error = result[finite] - expected[finite]
                total += float((error * block.weight) @ (error * block.weight)) if np.isfinite(error).all() else np.inf
            energies.append(total)
        return np.array(energies)

    def deviations(self, energies: Sequence[float]) -> dict[str, NDArray[np.float64]]:
        """Return the standard deviation of each element if the probes see these squared errors."""
        deviations = {name: np.zeros(value.size) for name, value in self.values.items()}
        for blocks, energy in zip(self.probes, energies, strict=True):
            sizes = [self._sizes(block) for block in blocks]
            whole = sum(float(size.sum()) for size in sizes)
            for block, size in zip(blocks, sizes, strict=True):
                even = 1 / len(blocks) / max(block.size, 1)
                shares = even if not whole else (1 - _EVEN) * size / whole + _EVEN * even
                deviations[block.output][block.start : block.stop] = np.sqrt(energy * shares) / block.weight
        return deviations

    def draws(self, energies: Sequence[float], by: Criterion, count: int) -> Iterator[list[float]]:
        """Yield the scores of the outputs in draws of normal errors with these squared sizes in the probes."""
        deviations = self.deviations(energies)
        for draw in range(count):
            yield [self._score(name, deviations[name] * self._normal(name, draw), by) for name in self.values]

    def _score(self, name: str, error: NDArray[np.float64], by: Criterion) -> float:
        exact = self.values[name].astype(np.float64)
        with np.errstate(all="ignore"):
            return float(by.score(exact, exact + error.reshape(exact.shape), np.isfinite(exact)))

    def _sizes(self, block: Block) -> NDArray[np.float64]:
        """Return the squared sizes of the elements of a block by the profile, as the probes weigh them."""
        known = self.profile.get(block.output)
        return np.zeros(block.size) if known is None else known[block.start : block.stop] * block.weight**2

    def _normal(self, name: str, draw: int) -> Array:
        known = self._draws.setdefault(name, [])
        while len(known) <= draw:
            seed = (self.number, list(self.values).index(name), len(known))
            drawn = np.random.default_rng(seed).standard_normal(self.values[name].size)
            alone = [
                block.start for blocks in self.probes for block in blocks if (block.output, block.size) == (name, 1)
            ]
            drawn[alone] = np.sign(drawn[alone])  # its error is known but for the sign
            known.append(drawn)
        return known[draw]


def worst_of(outputs: Sequence[Outputs], energies: NDArray[np.float64], by: Criterion) -> float:
    """Return the expected worst score of any output in any batch; `energies` of all probes in order. NaN if lost."""
    if not outputs or not np.isfinite(energies).all():
        return np.nan
    size = sum(value.size for each in outputs for value in each.values.values())
    count = int(np.clip(_DRAWS // max(size, 1), 1, 32))
    ends = np.cumsum([len(each.probes) for each in outputs])[:-1]
    parts = zip(outputs, np.split(energies, ends), strict=True)
    draws = zip(*(each.draws(part.tolist(), by, count) for each, part in parts), strict=True)
    worsts = [reduce(lambda a, b: b if worse(by, b, a) else a, chain.from_iterable(draw)) for draw in draws]
    return float(np.mean(worsts))


def row_of(value: Array) -> int:
    """Return the number of elements along the last axis of an output, 1 for a vector."""
    return int(value.shape[-1]) if value.ndim > 1 else 1


def _weight(value: Array) -> float:
    """Return 1 / |y| over the finite elements; 1 for zeros."""
    finite = value[np.isfinite(value)].astype(np.float64)
    norm = float(np.sqrt(finite @ finite))
    return 1.0 / norm if norm > _TINY else 1.0


def _parts(block: Block, count: int, row: int) -> Iterator[Block]:
    """Yield a block in parts, between rows where there are enough of them."""
    row = row if row * count <= block.size else 1
    bounds = np.linspace(block.start, block.stop // row, count + 1).astype(int) * row
    for start, stop in pairwise(bounds.tolist()):
        if stop > start:
            yield Block(block.batch, block.output, start, stop, block.weight)


_TINY = 1e-30
