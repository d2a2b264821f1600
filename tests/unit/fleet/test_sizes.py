"""Sizes by which a batch orders its models."""

from __future__ import annotations

from pathlib import Path

from amp_rewrite.fleet.batch import _bytes
from amp_rewrite.fleet.tree import Listing


def test_a_model_counts_with_its_data_here_and_in_stores(tmp_path: Path) -> None:
    for name, size in (("m.onnx", 5), ("m.data", 70), ("n.onnx", 3)):
        (tmp_path / name).write_bytes(bytes(size))
    model, data, other = tmp_path / "m.onnx", str(tmp_path / "m.data"), tmp_path / "n.onnx"
    assert [_bytes(path, Listing(data={model: (data,)})) for path in (model, other, tmp_path / "none")] == [76, 4, 1]
    stored = Path("memory://hub/m.onnx"), Path("memory://hub/m.data")
    listing = Listing(data={stored[0]: (str(stored[1]),)}, sizes={stored[0]: 5, stored[1]: 70})
    assert _bytes(stored[0], listing) == 76 and _bytes(stored[1], listing) == 71
