"""Probes: random signs on blocks of the outputs, and the errors of outputs that the probes tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.evidence.metric import Criterion, worse
from amp_rewrite.files.casting import Array

PROBES = 4
"""Runs of the adjoint model for each batch."""
_DRAWS = 4096
"""Draws of an error for small outputs: enough elements for a stable largest one."""


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

    Each probe has its own blocks: those of one output, or of several if there are more outputs than probes.
    """

    number: int
    values: Mapping[str, Array]
    probes: tuple[tuple[Block, ...], ...]
    _draws: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, number: int, values: Mapping[str, Array], probes: int = PROBES) -> Outputs:
        """Return the outputs with at most so many probes, the largest outputs first."""
        wholes = [Block(number, name, 0, value.size, _weight(value)) for name, value in values.items()]
        if len(wholes) >= probes:
            parts = np.array_split(np.arange(len(wholes)), probes)
            return cls(number, values, tuple(tuple(wholes[i] for i in part) for part in parts))
        pieces = {block.output: 1 for block in wholes}
        for _ in range(probes - len(wholes)):
            largest = max(wholes, key=lambda block: block.size / pieces[block.output])
            pieces[largest.output] += 1
        cut = (part for block in wholes for part in _parts(block, pieces[block.output]))
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

    def scores(self, energies: Sequence[float], by: Criterion) -> Iterator[float]:
        """Yield the score of each output if its error were normal, with these squared sizes in the probes.

        Of each probe its blocks share the relative error. The mean over draws stands for the expected score.
        """
        deviations = {name: np.zeros(value.size) for name, value in self.values.items()}
        for blocks, energy in zip(self.probes, energies, strict=True):
            for block in blocks:
                part = energy / len(blocks) / max(block.size, 1)
                deviations[block.output][block.start : block.stop] = np.sqrt(part) / block.weight
        for name, value in self.values.items():
            exact = value.astype(np.float64)
            finite = np.isfinite(exact)
            noises = self._normal(name)
            with np.errstate(all="ignore"):
                noisy = (exact + (deviations[name] * noise).reshape(exact.shape) for noise in noises)
                yield float(np.mean([by.score(exact, other, finite) for other in noisy]))

    def _normal(self, name: str) -> list[NDArray[np.float64]]:
        if name not in self._draws:
            size = self.values[name].size
            rng = np.random.default_rng(size)
            self._draws[name] = [rng.standard_normal(size) for _ in range(int(np.clip(_DRAWS // max(size, 1), 1, 32)))]
        return self._draws[name]


def worst_of(outputs: Sequence[Outputs], energies: NDArray[np.float64], by: Criterion) -> float:
    """Return the worst expected score of any output in any batch; `energies` of all probes in order. NaN if lost."""
    if not np.isfinite(energies).all():
        return np.nan
    worst: float | None = None
    at = 0
    for each in outputs:
        part = energies[at : at + len(each.probes)]
        at += len(each.probes)
        for score in each.scores(part.tolist(), by):
            worst = score if worst is None or worse(by, score, worst) else worst
    return np.nan if worst is None else worst


def _weight(value: Array) -> float:
    """Return 1 / |y| over the finite elements; 1 for zeros."""
    finite = value[np.isfinite(value)].astype(np.float64)
    norm = float(np.sqrt(finite @ finite))
    return 1.0 / norm if norm > _TINY else 1.0


def _parts(block: Block, count: int) -> Iterator[Block]:
    bounds = np.linspace(block.start, block.stop, count + 1).astype(int)
    for start, stop in pairwise(bounds.tolist()):
        if stop > start:
            yield Block(block.batch, block.output, start, stop, block.weight)


_TINY = 1e-30
