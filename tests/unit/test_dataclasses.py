"""Fields of the package's dataclasses: their defaults, and what their reprs leave out."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from amp_rewrite.decide.cast_plan import Cast
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.state import PaintOptions
from amp_rewrite.decide.pin import Pin
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.metric import Measure
from amp_rewrite.evidence.ranges import Range
from amp_rewrite.files.rounding import Fit
from amp_rewrite.ir.view import View
from amp_rewrite.reports.measurements import Difference
from amp_rewrite.reports.rows import BakeRow, CastRow, Row, Totals
from amp_rewrite.runtime.binding import Binding
from amp_rewrite.runtime.kernels import Kernels
from amp_rewrite.runtime.ports import Port
from amp_rewrite.runtime.roofline import Roof
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.choices import Placement
from amp_rewrite.settings.op_lists import OpLists
from amp_rewrite.settings.options import Option
from amp_rewrite.train.update.optimizers import SGD

FIT = dict.fromkeys(("count", "nonfinite", "overflow", "flushed", "subnormal"), 0)
DEFAULTS: dict[type, dict[str, object]] = {
    Cast: {"saturates": False},
    PaintOptions: {"shapes_follow": False, "spare_casts": False, "rescale": False},
    Pin: {"raises": False},
    Conditions: {"allow_nonfinite": False, "threads": 0},
    Difference: {"compared": 0},
    Measure: {"higher": True, "whole": False},
    Range: FIT,
    Fit: FIT,
    Row: {"named": True, "because_row": -1},
    CastRow: {"readers": 0, "after": -1, "slot": 0, "dead": False},
    BakeRow: {"keeps_original": False},
    Totals: dict.fromkeys(Totals.__annotations__, 0),
    Port: {"required": True},
    Roof: {"bfloat16": True},
    SessionOptions: {"optimized": True, "planned": True, "pooled": True, "spinning": True, "threads": 0},
    Placement: {"islands": False},
    Option: {"keyword": True, "setting": True, "flag": False, "integers": False, "rare": False},
    SGD: {"decay_biases_and_norms": True, "nesterov": False},
}


@pytest.mark.parametrize("owner", DEFAULTS, ids=lambda owner: owner.__name__)
def test_numbers_and_switches_default_to_what_is_documented(owner: type) -> None:
    stated = {name: p.default for name, p in inspect.signature(owner).parameters.items()}
    assert {name: value for name, value in stated.items() if isinstance(value, int)} == DEFAULTS[owner]


@pytest.mark.parametrize("owner", [Binding, Coloring, Feed, Kernels, OpLists, Runner, View], ids=lambda o: o.__name__)
def test_a_repr_leaves_out_tables_and_private_fields(owner: type) -> None:
    shown = {f.name for f in dataclasses.fields(owner) if f.repr}
    assert {name for name in shown if name.startswith("_")} == set()
    assert shown.isdisjoint({"registrations", "aliases", "names"} | ({"entries"} if owner is OpLists else set()))
