"""Handwritten digits for the examples: MNIST from a folder, else scikit-learn's digits drawn larger.

MNIST is four files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, with or without .gz); nothing is
downloaded here. scikit-learn's 1797 digits of 8 x 8 pixels come with the package; where it is not installed, the 360
of them that lie in `examples/models` do.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 28
HELD_OUT = Path(__file__).parents[1] / "models" / "digits_test.npz"


@dataclass(frozen=True)
class Digits:
    """Images float32 [rows, 784] in [0, 1] and classes int64 [rows], to train on and to be judged by."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    origin: str

    def batches(self, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """All rows in a random order, as `image` and `label`; the last batch may be smaller."""
        order = np.random.default_rng(seed).permutation(len(self.x))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield {"image": self.x[rows], "label": self.y[rows]}

    @property
    def test(self) -> list[dict[str, np.ndarray]]:
        return [{"image": self.x_test, "label": self.y_test}]


def load(mnist: Path | None = None, *, shipped: bool = False) -> Digits:
    """MNIST if its folder is given, else the digits that are there; those in `examples/models` alone if `shipped`."""
    if mnist is not None:
        parts = [_idx(mnist, f"{part}-{kind}") for part in ("train", "t10k") for kind in _KINDS]
        x, y, x_test, y_test = (np.asarray(part) for part in parts)
        return Digits(_flat(x / 255), _labels(y), _flat(x_test / 255), _labels(y_test), f"MNIST in {mnist}")
    images, labels, origin = _shipped() if shipped else _small()
    # a fifth is held out; the same rows each time
    order = np.random.default_rng(20).permutation(len(images))
    held, rest = order[: len(order) // 5], order[len(order) // 5 :]
    x = _flat(_drawn_larger(images))
    return Digits(x[rest], labels[rest], x[held], labels[held], origin)


_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _small() -> tuple[np.ndarray, np.ndarray, str]:
    """Images [rows, 8, 8] in [0, 1], classes, and where they come from."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return _shipped()
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8) / 16, _labels(labels), "scikit-learn's digits"


def _shipped() -> tuple[np.ndarray, np.ndarray, str]:
    with np.load(HELD_OUT) as found:
        return found["x"].reshape(-1, 8, 8), found["y"], "360 of scikit-learn's digits"


def _drawn_larger(images: np.ndarray) -> np.ndarray:
    """8 x 8 pixels as 24 x 24 with an empty border of 2, as MNIST has one."""
    return np.pad(np.kron(images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))


def _flat(images: Any) -> np.ndarray:
    return np.ascontiguousarray(images.reshape(len(images), SIDE * SIDE), np.float32)


def _labels(labels: Any) -> np.ndarray:
    return np.asarray(labels, np.int64)


def _idx(folder: Path, name: str) -> np.ndarray:
    """An array in MNIST's own format: a magic number whose last byte is the rank, the dims, the bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise SystemExit(f"{folder} has no {name} (or {name}.gz); name the folder with MNIST's four files")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rank = raw[3]
    dims = np.frombuffer(raw, ">u4", rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(dims)
