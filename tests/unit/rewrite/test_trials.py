"""Random inputs on which a fusion is tried: usual ones, tiny ones and large ones."""

from __future__ import annotations

import pytest
from onnx import helper

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.equivalence import node_mismatch
from support import cases

SAME = "y=Identity(x)"
BUMP = "a=Abs(x);b=Greater(a,low);c=Less(a,high);d=And(b,c);e=Cast[to=1](d);f=Mul(e,x);y=Add(f,x)"
LIMITS = {
    "tiny": ("y=Add(x,low)", {"low": 1e-9}),
    "usual": (BUMP, {"low": 0.8, "high": 1.2}),
    "large": ("y=Clip(x,low,high)", {"low": -20.0, "high": 20.0}),
}


def differs(text: str, constants: dict[str, float]) -> bool:
    view = View.of(Model.load(cases.build(text, ["y"], shapes={"x": (4, 8)}, constants=constants)))
    node = helper.make_node("Identity", ["x"], ["y"])
    tried = {value.id: (4, 8) for value in view.values if value.name == "x"}
    ops = [op.id for op in view.ops]
    return node_mismatch(view, ops, node, tried, view.opsets, elementwise=True) is not None


@pytest.mark.parametrize("size", LIMITS)
def test_a_difference_at_one_size_of_numbers_is_seen(size: str) -> None:
    text, constants = LIMITS[size]
    assert differs(text, constants)
    assert not differs(SAME, {})
