"""Run the cells of examples/notebooks/tour.ipynb and store their outputs: `python tools/build_notebook.py`.

A notebook is plain JSON, so Jupyter is not needed. All cells run in one namespace, in the folder of the notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebooks" / "tour.ipynb"
Cell = dict[str, Any]


def code_cells(notebook: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield the code cells of a notebook."""
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def outputs(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run the code of a cell; return its output, and the value of its last expression as Jupyter would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), namespace)
    results: list[dict[str, Any]] = []
    if text := printed.getvalue():
        results.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": value._repr_html_().splitlines(keepends=True), **data}
        results.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return results


def run(file: Path = NOTEBOOK) -> dict[str, Any]:
    """Return a notebook with new outputs of its cells."""
    notebook: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(file.parent):
        for number, cell in enumerate(code_cells(notebook), start=1):
            cell["execution_count"] = number
            cell["outputs"] = outputs("".join(cell["source"]), namespace, number)
    return notebook


def written(notebook: Mapping[str, Any]) -> str:
    """Return the text of a notebook as Jupyter writes it."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(run()), encoding="utf-8")
