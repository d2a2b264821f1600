"""The size of a model whose local functions are inlined: chains, circles and copies of copies."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import pytest
from onnx import helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files import loading
from amp_rewrite.files.loading import check_expansion

CIRCLE = "its local functions call each other in a circle, or more than 3 deep"


def model(calls: Mapping[str, str], *, branch: bool = False) -> onnx.ModelProto:
    """A model that calls the function a, perhaps in a branch; `calls` has what each calls, "R" for a Relu."""

    def nodes(called: str) -> list[onnx.NodeProto]:
        words = (("Relu", "") if name == "R" else (name, "own") for name in called)
        return [helper.make_node(op, ["x"], ["y"], domain=domain) for op, domain in words]

    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", name, ["x"], ["y"], nodes(body), imports) for name, body in calls.items()]
    main = nodes("a")
    if branch:
        body = helper.make_graph(main, "body", [], [])
        main = [helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)]
    return helper.make_model(helper.make_graph(main, "g", [], []), functions=functions, opset_imports=imports)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(
    ("calls", "refusal"),
    [
        ({}, ""),
        ({"a": "b", "b": "c", "c": "R"}, ""),
        ({"a": "b", "b": "c", "c": "d", "d": "R"}, CIRCLE),
        ({"a": "a"}, CIRCLE),
        ({"b": "b"}, ""),  # nothing calls it
        ({"a": "bbbb", "b": "cccc", "c": "RRRR"}, "its local functions, inlined, are {} nodes, of {} in the file"),
        ({"a": "bb", "b": "cc", "c": "RRR"}, ""),
    ],
)
def test_functions_are_inlined_within_limits(
    calls: Mapping[str, str], refusal: str, branch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_DEEPEST_CALLS", 3)
    monkeypatch.setattr(loading, "_LARGEST", 30)
    monkeypatch.setattr(loading, "_GROWTH", 2)
    proto = model(calls, branch=branch)
    if not refusal:
        check_expansion(proto, "m")
        return
    nodes = (1 + 2 * 85, 15) if branch else (85, 13)  # of the longest row
    with pytest.raises(ModelError) as error:
        check_expansion(proto, "m")
    assert str(error.value).startswith(f"m: {refusal.format(*nodes)}")
