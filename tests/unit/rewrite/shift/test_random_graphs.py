"""Graphs that nobody wrote, with bodies, functions and all opsets: a shift changes no bit of them, and no name."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, note, settings
from hypothesis import strategies as st

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import canonicalize
from amp_rewrite.rewrite.shift.emit import refusal
from amp_rewrite.settings.request import Request
from support.random_graphs import Graph, graphs
from support.shifting import bits, shifted_at_random


@given(graph=graphs(), seed=st.integers(0, 1000), truth=st.booleans())
@settings(max_examples=60)
def test_a_random_shift_of_a_random_graph_changes_no_bit(graph: Graph, seed: int, truth: bool) -> None:
    note(graph.text())
    view = canonicalize(View.of(Model.load(graph.model())), Request.of(fuse="none")).view
    if refusal(view):
        return
    feeds = graph.feeds(np.random.default_rng(seed), truth)
    before = view.model.to_proto()
    after = shifted_at_random(view, seed).view.model.to_proto()
    onnx.checker.check_model(after)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    assert bits(after, feeds) == bits(before, feeds)
