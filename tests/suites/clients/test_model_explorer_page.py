"""Overlays in the real Model Explorer, opened in Chromium: each layer, with its values beside the right nodes."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import amp_rewrite
from amp_rewrite import Model
from amp_rewrite.reports.measurements import LocatedErrors
from amp_rewrite.reports.model_explorer import overlay
from support.browser import CHROMIUM, WIDE, chromium
from support.paths import ROOT

__all__ = ["chromium"]

pytestmark = [pytest.mark.clients, pytest.mark.browser, pytest.mark.filterwarnings("ignore")]

SOURCE = ROOT / "examples" / "models" / "digits_mlp.onnx"
DIGITS = ROOT / "examples" / "models" / "digits_test.npz"
PROGRAM = Path(sys.executable).parent / "model-explorer"
STARTS = 120
"""Seconds that the server may take to start."""
ROW = re.compile(r"^\d+\t([^\t]+)\t(.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted file, and its layers by name."""
    import numpy as np

    pytest.importorskip("model_explorer_onnx.main", reason="needs model-explorer-onnx")
    if not PROGRAM.exists() or CHROMIUM is None:
        pytest.skip("needs ai-edge-model-explorer and Chromium")
    folder = tmp_path_factory.mktemp("explorer")
    low = amp_rewrite.convert(SOURCE)
    low.save(folder / "low.onnx")
    batch = {"image": np.load(DIGITS)["x"][:8]}
    (folder / "located.json").write_text(amp_rewrite.locate(SOURCE, low, batch).to_json())
    for name in ("type", "rule", "error"):
        errors = LocatedErrors.load(folder / "located.json") if name == "error" else None
        report = low.report if name == "rule" else None
        text = overlay(Model.load(folder / "low.onnx"), name, report=report, errors=errors)
        (folder / f"{name}.json").write_text(text)
    return {name: folder / f"{name}.json" for name in ("type", "rule", "error")} | {"model": folder / "low.onnx"}


@pytest.fixture(scope="module")
def address(layers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address at which Model Explorer shows the file with its layers."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    data = ",".join(str(layers[name]) for name in ("type", "rule", "error"))
    words = [str(PROGRAM), str(layers["model"]), "--extensions=model_explorer_onnx", f"--node_data_paths={data}"]
    told = tmp_path_factory.mktemp("server") / "told.txt"
    words += ["--no_open_in_browser", f"--port={port}"]
    with told.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out) as server:
        try:
            yield wait_for(told, server)
        finally:
            server.terminate()


def wait_for(told: Path, server: subprocess.Popen[bytes]) -> str:
    """Return the address that the server tells."""
    end = time.monotonic() + STARTS
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"http://localhost:\d+/\?data=\S+", told.read_text()):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"Model Explorer does not start: {told.read_text()}")


def nodes(model: Path) -> list[Any]:
    """The nodes that the adapter gives the viewer, in its order."""
    from model_explorer_onnx.main import ONNXAdapter

    logging.disable(logging.WARNING)
    try:
        return list(ONNXAdapter().convert(str(model), {})["graphs"][0].nodes)
    finally:
        logging.disable(logging.NOTSET)


def test_the_viewer_lists_each_layer_and_the_value_of_each_node(
    layers: dict[str, Path], address: str, chromium: Any
) -> None:
    page = chromium.new_page(viewport={"width": WIDE, "height": 900})
    page.goto(address)
    page.get_by_text("NODE DATA PROVIDERS").wait_for(timeout=60_000)
    page.wait_for_function("/^1\\t/m.test(document.body.innerText)", timeout=60_000)  # the table of nodes
    shown = page.inner_text("body")
    assert all(re.search(rf"^{name}$", shown, re.MULTILINE) for name in ("type", "rule", "error"))
    data = {name: next(iter(json.loads(layers[name].read_text()).values()))["results"] for name in ("type", "rule")}
    rows = dict.fromkeys(ROW.findall(shown))
    for node in nodes(layers["model"])[:20]:
        values = [data[name].get(node.id, {}).get("value", "-") for name in ("type", "rule")]
        assert any(label == node.label and all(value in cells for value in values) for label, cells in rows), node.id
    page.close()
