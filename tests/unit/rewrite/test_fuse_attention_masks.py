"""Masks and biases of attention, in every form that exporters give them; also where a row shows no key."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from amp_rewrite.rewrite.equivalence import UNIT
from support.attention_models import (
    BIASED,
    GUARDED,
    HIDDEN,
    INVERTED,
    MASK,
    OLD,
    OLD_KINDS,
    SCORES,
    SUMMED,
    TESTED,
    WEIGHTS,
    ZEROED,
    K,
    V,
    agree,
    attention,
    feed_of,
    model_of,
    unused,
)
from support.fusing import kinds, outputs_of, standard

IDS = ", int64[2,1,3,5] ids"
CHOSEN = "a = Where (mask, bias, fill)  m = Add (z, a)  "
COMPUTED = ", float[1,1,3,5] w"
HALVED = "h = Sigmoid (w)  u = Div (h, two)  m = Add (z, u)  "
OTHER = "o = Cast <to = 1> (others)  d = Cast <to = 9> (ids)  c = Where (d, fill, o)  m = Add (z, c)  "
"""A twin of what is tested for not being 0: what is added elsewhere is something else, and counts."""
OTHERS = IDS + ", int64[2,1,3,5] others"
ADDED = ["Where", "Where", "Where"]


@pytest.mark.parametrize(
    ("body", "more", "expected", "read"),
    [
        (SCORES + "m = Where (every, z, fill)  " + WEIGHTS, "", ["Attention"], 3),
        (SCORES + "m = Where (some, z, fill)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "m = Add (z, added)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "n = Where (some, zero, billion)  m = Add (z, n)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "m = Add (bias, z)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "b = Add (z, bias)  m = Where (some, b, fill)  " + WEIGHTS, "", ["Where", "Attention"], 4),
        (BIASED + "m = Where (mask, b, fill)  " + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (BIASED + "m = Where (mask, b, inf)  " + GUARDED, MASK, [*HIDDEN, "Where", *ZEROED], 4),
        (SCORES + SUMMED + "m = Add (z, b)  " + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (SCORES + OLD + WEIGHTS, IDS, [*OLD_KINDS, "Attention"], 4),
        (SCORES + INVERTED + WEIGHTS, IDS, [*OLD_KINDS, "Greater", *HIDDEN, *ADDED, "Attention"], 4),
        (SCORES + TESTED + WEIGHTS, IDS, ["Cast", "Sub", "Cast", "Not", *HIDDEN, "Where", "Attention"], 4),
        (SCORES + HALVED + WEIGHTS, COMPUTED, ["Sigmoid", "Div", "Attention"], 4),
        (SCORES + OTHER + WEIGHTS, OTHERS, ["Cast", "Cast", "Not", *HIDDEN, *ADDED, "Attention"], 4),
        (SCORES + CHOSEN + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (BIASED + "a = Cast <to = 1> (ids)  m = Add (b, a)  " + WEIGHTS, IDS, ["Cast", "Add", "Attention"], 4),
        (SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, fill, z)  " + WEIGHTS, MASK, ["Not", *HIDDEN, "Where", "Attention"], 4),
        (SCORES + "a = Where (mask, zero, fill)  m = Add (z, a)  " + WEIGHTS, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, z, fill)  " + GUARDED, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, z, inf)  " + GUARDED, MASK, [*HIDDEN, *ZEROED], 4),
        (SCORES + "a = Where (mask, inf, zero)  m = Add (a, z)  " + GUARDED, MASK, ["Not", *HIDDEN, *ZEROED], 4),
    ],
)  # fmt: skip
def test_a_mask_of_each_form_gives_the_same_also_where_it_hides_every_key(
    body: str, more: str, expected: list[str], read: int
) -> None:
    model = model_of(body, more)
    made, told = standard(model)
    assert (kinds(made), len(attention(made).input)) == (expected, read)
    assert [kind for kind, subject, _ in told if subject != "constants"] == ["fused"]
    agree(model, made)


def test_a_row_without_a_key_is_the_mean_of_all_values_or_0_as_the_model_has_it() -> None:
    """What the runtime gives for the operator alone is neither asked nor trusted."""
    for end, body in (("mean", "fill)  " + WEIGHTS), ("zero", "inf)  " + GUARDED)):
        model = model_of(SCORES + "m = Where (mask, z, " + body, MASK)
        feed = feed_of(model)
        (y,) = outputs_of(standard(model)[0], feed)
        expected = feed["v"].mean(axis=2) if end == "mean" else np.zeros((2, 2, 6))
        np.testing.assert_allclose(y[:, :, 1], expected, atol=16 * UNIT * float(np.abs(feed["v"]).max()))


def test_a_triangle_over_as_many_keys_as_queries_is_the_causal_attribute() -> None:
    body = SCORES + "m = Where (past, z, fill)  " + WEIGHTS
    model = model_of(body, inputs=f"float[2,2,5,4] q, {K}, {V}", output="float[2,2,5,6] y")
    made, _ = standard(model)
    assert (kinds(made), len(made.graph.initializer)) == (["Attention"], 0 + len(unused(model)))
    assert helper.get_node_attr_value(attention(made), "is_causal") == 1
    agree(model, made)
