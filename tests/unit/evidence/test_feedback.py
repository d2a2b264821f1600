"""Feedback: outputs that a model reads in its next run, as a streaming model reads its states."""

from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite import calibrate, convert, verify
from amp_rewrite.errors import FeedError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.data.feedback import state_pairs
from amp_rewrite.evidence.opening import unrolled
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner


def model(ports: str, body: str, constants: str = "") -> Model:
    """Return a model; "__" in a name stands for a dot."""
    held = f"<{constants}>" if constants else ""
    text = f'<ir_version: 8, opset_import: ["": 17]> g {ports} {held} {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for formal in (*proto.graph.input, *proto.graph.output):
        formal.name = formal.name.replace("__", ".")
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("__", ".") for name in names]
    return Model.load(proto)


SUM = model("(float[2] x, float[2] h) => (float[2] hn, float[2] y)", "hn = Add (h, x) y = Neg (hn)")
X = np.float32([1, 2])
CHUNKS = [{"x": np.float32([n, 2 * n])} for n in range(1, 5)]
LEAK = np.diag(np.full(8, 0.999)).astype(np.float32).ravel().tolist()
LEAKY = model(
    "(float[1,8] x, float[1,8] h) => (float[1,8] hn, float[1,8] y)",
    "[leak] k = MatMul (h, keep) [in] hn = Add (k, x) [scale] y = MatMul (hn, turn)",
    f"float[8,8] keep = {{{','.join(map(str, LEAK))}}},"
    f" float[8,8] turn = {{{','.join(map(str, np.eye(8)[::-1].ravel()))}}}",
)
"""A state that forgets a thousandth of itself in each run: of 1, float16 cannot take that little away."""
DRIP = {"x": np.full((1, 8), 1.3e-3, np.float32), "h": np.full((1, 8), 0.5, np.float32)}


def outputs(feed: Feed, of: Model = SUM) -> list[list[float]]:
    runner = Runner.open(of)
    return [np.ravel(runner.run(batch)["hn"]).tolist() for batch in unrolled(feed, of)]


# -- which runs follow each other -----------------------------------------------------------------------------


STATES = [{"x": X, "h": np.float32([10, 20])}, {"x": X, "h": np.float32([99, 99])}]


@pytest.mark.parametrize(
    ("batches", "options", "expected", "said"),
    [
        (CHUNKS, {}, [[1, 2], [3, 6], [6, 12], [10, 20]], "one sequence"),
        (CHUNKS[:2], {"steps": 3}, [[1, 2], [2, 4], [3, 6], [2, 4], [4, 8], [6, 12]], "3 steps each"),
        # a sequence begins with the state in the data, and later ones are not read
        (STATES, {}, [[11, 22], [12, 24]], "one sequence"),
        (STATES, {"steps": 2}, [[11, 22], [12, 24], [100, 101], [101, 103]], "2 steps each"),
    ],
)
def test_batches_are_steps_of_one_sequence_or_each_starts_its_own(
    batches: Any, options: dict[str, int], expected: list[list[float]], said: str
) -> None:
    feed = Feed.of(batches, SUM, feedback="hn=h", **options)
    assert outputs(feed) == outputs(feed) == expected
    assert (len(feed), feed.origin) == (len(expected), f"the batches given, {said}, hn fed back to h")


def test_a_star_pairs_names_that_are_alike_and_a_cache_grows_with_each_step() -> None:
    cache = model("(float[1,2] x, float[past,2] h) => (float[all,2] hn)", "hn = Concat <axis = 0> (h, x)")
    first = {"x": np.ones((1, 2), np.float32), "h": np.zeros((0, 2), np.float32)}
    feed = Feed.of(first, cache, feedback="hn=h", steps=4)
    assert [len(out) for out in outputs(feed, cache)] == [2, 4, 6, 8]
    assert verify(cache, cache, feed, tolerance=0.0).ok
    assert calibrate(cache, feed).values["hn"].count == 2 * (1 + 2 + 3 + 4)
    many = model(
        "(float[2] x, float[2] past__0__k, float[2] past__1__k) => (float[2] present__0__k, float[2] present__1__k)",
        "present__0__k = Add (past__0__k, x) present__1__k = Sub (past__1__k, x)",
    )
    feed = Feed.of({"x": X}, many, feedback="present.*=past.*", steps=2)
    assert feed.feedback is not None
    assert feed.feedback.pairs == (("present.0.k", "past.0.k"), ("present.1.k", "past.1.k"))
    assert verify(many, many, feed, tolerance=0.0).fed.origin.endswith("present.0.k fed back to past.0.k and 1 more")


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "steps", "why"),
    [
        ("hn1=h", 2, "feedback='hn1=h': the model has no output 'hn1'; did you mean 'hn'?"),
        ("other=h", 2, "feedback='other=h': the model has no output 'other'; it has 'hn', 'y'"),
        (["hn=h", "y=h"], 2, "feedback='y=h': input 'h' takes 'hn' already; name one output for it"),
        ("hn", 2, "feedback='hn' is not of the form OUT=IN, such as hn=h or present.*=past.*"),
        ("a*=h*", 2, "feedback='a*=h*' matches no output; the model has 'hn', 'y'"),
        ((), 3, "steps=3 needs feedback='OUT=IN', and 1 step or more"),
        (
            "hn=h",
            None,
            "the arrays given, one sequence, hn fed back to h: one batch is one run, and nothing is fed back; give"
            " several batches, or steps=100 to run it 100 times",
        ),
    ],
)
def test_what_cannot_be_fed_back_is_refused_with_what_can(words: Any, steps: int | None, why: str) -> None:
    with pytest.raises(FeedError) as refused:
        Feed.of({"x": X}, SUM, feedback=words, steps=steps)
    assert str(refused.value) == why


@pytest.mark.parametrize(
    ("out", "fact"),
    [
        ("float[3] y", "float32 [3], and input 'h' float32 [2]"),
        ("seq(float[2]) y", "seq of float32 [2], and input 'h' float32 [2]"),
    ],
)
def test_an_output_of_another_type_or_shape_is_refused(out: str, fact: str) -> None:
    other = model(f"(float[2] x, float[2] h) => (float[2] hn, {out})", "hn = Add (h, x) y = Neg (hn)")
    with pytest.raises(FeedError) as refused:
        Feed.of(CHUNKS, other, feedback="y=h")
    assert str(refused.value) == f"feedback='y=h': output 'y' is {fact}; outputs that fit 'h': 'hn'"


def test_each_model_gets_its_own_states_and_a_first_one_of_unknown_shape_is_given() -> None:
    free = model("(float[2] x, float[n] h) => (float[n] hn)", "hn = Add (h, x)")
    with pytest.raises(FeedError, match=r"first 'h' is not in the data, and float32 \[n\] does not say how many zeros"):
        Feed.of(CHUNKS, free, feedback="hn=h")
    assert outputs(Feed.of([{"x": X, "h": X}, {"x": X}], free, feedback="hn=h"), free) == [[2, 4], [3, 6]]
    twice = model(
        "(float[2] x, float[2] h) => (float[2] hn, float[2] y)", "d = Add (h, x) hn = Add (d, x) y = Neg (hn)"
    )
    verdict = verify(SUM, twice, Feed.of(CHUNKS, SUM, feedback="hn=h"), outputs="y", tolerance=1e-2)
    values = [(row.batch, row.difference.reference, row.difference.candidate) for row in verdict.rows]
    assert values == [(0, "-2", "-4"), (1, "-6", "-12"), (2, "-12", "-24"), (3, "-20", "-40")]


# -- what runs on it ------------------------------------------------------------------------------------------


def test_a_conversion_keeps_in_float32_what_overflows_at_a_later_step() -> None:
    tens = np.diag(np.full(8, 10)).ravel().tolist()
    growing = model(
        "(float[1,8] x, float[1,8] h) => (float[1,8] hn)",
        "k = MatMul (h, w) hn = Add (k, x)",
        f"float[8,8] w = {{{','.join(map(str, tens))}}}",
    )
    x = np.ones((1, 8), np.float32)
    feeds = [Feed.of({"x": x}, growing, feedback="hn=h", steps=steps) for steps in (2, 7)]
    assert [convert(growing, data=feed, target="onnx", shift="none").plan.empty for feed in feeds] == [False, True]


# -- states that a model seems to have ------------------------------------------------------------------------

BODY = "{out} = Add ({into}, x) y = Neg ({out})"


@pytest.mark.parametrize(
    ("out", "into"),
    [
        ("hn", "h"),
        ("h_n", "h_0"),
        ("hn", "h0"),
        ("stateN", "state"),
        ("state_out", "state_in"),
        ("new_state", "prev_state"),
        ("present.0.key", "past_key_values.0.key"),
        ("present_0", "past_0"),
        ("new_cached_key_0", "cached_key_0"),
    ],
)
def test_names_tell_a_state(out: str, into: str) -> None:
    after, before = out.replace(".", "__"), into.replace(".", "__")
    ports = f"(float[2] x, float[2] {before}) => (float[2] {after}, float[2] y)"
    assert state_pairs(model(ports, BODY.format(out=after, into=before))) == {out: into}


@pytest.mark.parametrize(
    ("ports", "body"),
    [
        ("(float[1] x, float[2] u) => (float[2] v, float[3] y)", "v = Add (u, x) y = Pad (v, p)"),  # other names
        ("(float[2] x, int64[2] h) => (float[2] hn)", "f = Cast <to = 1> (h) hn = Add (f, x)"),
        ("(float[2] x, float[1] h) => (float[2] hn)", "hn = Add (h, x)"),
        ("(float[2] h) => (float[2] hn)", "hn = Neg (h)"),  # no input for data
    ],
)
def test_names_types_and_shapes_of_a_state_must_fit(ports: str, body: str) -> None:
    assert state_pairs(model(ports, body, "int64[2] p = {0, 1}")) == {}
