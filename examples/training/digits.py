"""Handwritten digits for the examples: MNIST from a folder, or scikit-learn's digits enlarged.

MNIST consists of four files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, with or without .gz), which you
must download yourself. scikit-learn ships 1797 digits of 8 x 8 pixels. Without scikit-learn, the examples use the 360
of them in `examples/models`.
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
    """Images (float32 [rows, 784] in [0, 1]) and classes (int64 [rows]) for training and testing."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    origin: str

    def batches(self, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all rows in random order, as `image` and `label`; the last batch may be smaller."""
        order = np.random.default_rng(seed).permutation(len(self.x))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield {"image": self.x[rows], "label": self.y[rows]}

    @property
    def test(self) -> list[dict[str, np.ndarray]]:
        return [{"image": self.x_test, "label": self.y_test}]


def load(mnist: Path | None = None, *, shipped: bool = False) -> Digits:
    """Load MNIST from a folder, or else the available digits; with `shipped`, only those in `examples/models`."""
    if mnist is not None:
        parts = [_idx(mnist, f"{part}-{kind}") for part in ("train", "t10k") for kind in _KINDS]
        x, y, x_test, y_test = (np.asarray(part) for part in parts)
        return Digits(_flat(x / 255), _labels(y), _flat(x_test / 255), _labels(y_test), f"MNIST in {mnist}")
    images, labels, origin = _shipped() if shipped else _small()
    # Hold out a fifth, with the same rows each time.
    order = np.random.default_rng(20).permutation(len(images))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    x = _flat(_enlarged(images))
    return Digits(x[train], labels[train], x[test], labels[test], origin)


_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _small() -> tuple[np.ndarray, np.ndarray, str]:
    """Return images [rows, 8, 8] in [0, 1], their classes and their source."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return _shipped()
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8) / 16, _labels(labels), "scikit-learn's digits"


def _shipped() -> tuple[np.ndarray, np.ndarray, str]:
    with np.load(HELD_OUT) as stored:
        return stored["x"].reshape(-1, 8, 8), stored["y"], "360 of scikit-learn's digits"


def _enlarged(images: np.ndarray) -> np.ndarray:
    """Scale 8 x 8 pixels to 24 x 24, and add an empty border of 2 pixels like MNIST's."""
    return np.pad(np.kron(images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))


def _flat(images: Any) -> np.ndarray:
    return np.ascontiguousarray(images.reshape(len(images), SIDE * SIDE), np.float32)


def _labels(labels: Any) -> np.ndarray:
    return np.asarray(labels, np.int64)


def _idx(folder: Path, name: str) -> np.ndarray:
    """Read an array in MNIST's format: a magic number with the rank as its last byte, the dims, and the bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise SystemExit(f"{folder} has no {name} (or {name}.gz); pass the folder with MNIST's four files")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rank = raw[3]
    dims = np.frombuffer(raw, ">u4", rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(dims)
