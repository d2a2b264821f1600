"""The example notebook runs and prints its stored outputs."""

import json
import re
import runpy
from typing import Any

from support.paths import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "build_notebook.py"))
_MACHINE = re.compile(r"( ?float16)?( emulated)? on \w+ExecutionProvider|, half precision emulated|\[[\d, ]+\]")
_NUMBER = re.compile(r"\d+(\.\d+)?e[+-]?\d+|\d+\.\d+")


def shown(notebook: dict[str, Any]) -> list[str]:
    """Return the text outputs of a notebook without providers and measured numbers, which depend on the machine."""
    texts = []
    for cell in TOOL["code_cells"](notebook):
        assert cell["outputs"], cell["source"]
        for output in cell["outputs"]:
            text = "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])
            texts.append(" ".join(_NUMBER.sub("#", _MACHINE.sub("", text)).split()))
    return texts


def test_the_cells_of_the_tour_print_their_stored_output() -> None:
    stored = json.loads(TOOL["NOTEBOOK"].read_text(encoding="utf-8"))
    assert shown(TOOL["run"]()) == shown(stored), "run tools/build_notebook.py and check the changes"


def test_the_tour_is_a_notebook_as_jupyter_writes_it() -> None:
    text = TOOL["NOTEBOOK"].read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == TOOL["written"](notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    pictures = [o for cell in TOOL["code_cells"](notebook) for o in cell["outputs"] if "text/html" in o.get("data", {})]
    assert pictures
    assert not re.search(r"/tmp|/home|/work", text)
