"""Node ids of overlays against the real ONNX adapter of Model Explorer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

import amp_rewrite
from amp_rewrite import Model
from amp_rewrite.reports.model_explorer import overlay
from support.corpus import EXPORTED, small_models
from support.paths import ROOT
from support.viewer_models import VIEWED

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # those of the adapter
]
BESIDE = ("Input", "Output", "Initializer", "InitializedInput", "(Capture)", "(Phi)")
"""Nodes that the adapter adds."""
SMALL = dict(small_models()) | {name: build() for name, build in VIEWED.items()}


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    main = pytest.importorskip("model_explorer_onnx.main", reason="needs model-explorer-onnx")
    logging.disable(logging.WARNING)
    yield main.ONNXAdapter()
    logging.disable(logging.NOTSET)


def check(adapter: Any, path: Path) -> None:
    """Fail unless the overlay names nodes of the adapter's graphs, and all of them that are nodes of the file."""
    shown = {graph.id: graph.nodes for graph in adapter.convert(str(path), {})["graphs"]}
    named = {graph: set(data["results"]) for graph, data in json.loads(overlay(Model.load(path))).items()}
    assert named.keys() <= shown.keys()
    for graph, nodes in shown.items():
        assert named.get(graph, set()) == {node.id for node in nodes if node.label not in BESIDE}


@pytest.mark.parametrize("name", SMALL)
def test_overlays_of_small_models_cover_what_the_adapter_shows(adapter: Any, tmp_path: Path, name: str) -> None:
    onnx.save(SMALL[name], tmp_path / "source.onnx")
    check(adapter, tmp_path / "source.onnx")
    if not SMALL[name].graph.name:
        return  # invalid for onnx's checker, so not converted
    amp_rewrite.convert(tmp_path / "source.onnx").save(tmp_path / "low.onnx")
    check(adapter, tmp_path / "low.onnx")


@pytest.mark.parametrize("name", EXPORTED)
def test_overlays_of_exported_models_cover_what_the_adapter_shows(adapter: Any, tmp_path: Path, name: str) -> None:
    check(adapter, ROOT / name)
    amp_rewrite.convert(ROOT / name).save(tmp_path / "low.onnx")
    check(adapter, tmp_path / "low.onnx")
