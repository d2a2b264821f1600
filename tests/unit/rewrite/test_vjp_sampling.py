"""Gradients of GridSample."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged, run_float32

IMAGE = {"x": (2, 2, 4, 3), "g": (2, 3, 2, 2)}
VOLUME = {"x": (2, 2, 3, 4, 2), "g": (2, 2, 2, 1, 3)}


def case(mode: str, padding: str, corners: int, shapes: dict[str, tuple[int, ...]] = IMAGE, what: str = "") -> Case:
    """With places in and around the image."""

    def torch(t, x, g):  # type: ignore[no-untyped-def]
        return t.nn.functional.grid_sample(x, g, "bilinear" if mode == "linear" else mode, padding, bool(corners))

    where = what or f"{len(shapes['x']) - 2} axes"
    name = f"GridSample, {mode}, {padding}{', corners aligned' * corners}, {where}"
    graph = f"y=GridSample[mode={mode},padding_mode={padding},align_corners={corners}](x,g)"
    wrt = ("x",) if mode == "nearest" else ()
    return Case(name, graph, shapes, wrt, low=-1.4, high=1.4, torch=torch)


CASES = (
    *(case("linear", padding, corners) for padding in ("zeros", "border", "reflection") for corners in (0, 1)),
    *(case("nearest", padding, 0) for padding in ("zeros", "border", "reflection")),
    *(
        case("linear", padding, corners, {"x": (1, 2, 1, 1), "g": (1, 2, 2, 2)}, "one place")
        for padding in ("zeros", "border", "reflection")
        for corners in (0, 1)
    ),
    case("linear", "zeros", 0, {"x": (2, 2, 3, 3), "g": (2, 0, 2, 2)}, "at no place"),
    case("linear", "border", 0, {"x": (0, 2, 3, 3), "g": (0, 2, 2, 2)}, "no image"),
    case("linear", "zeros", 0, VOLUME),
    case("linear", "reflection", 1, VOLUME),
)  # fmt: skip
TestRules = judged(CASES)


def test_a_mode_has_the_same_gradients_by_its_older_name() -> None:
    def slopes(mode: str, opset: int) -> list[np.ndarray]:
        case = Case("", f"y=GridSample[mode={mode}](x,g)", IMAGE, opsets=(opset,))
        made = gradients(case.model(opset), "loss", ["x", "g"]).to_proto()
        return run_float32(made, case.feed(), ["x_grad", "g_grad"])

    for a, b in zip(slopes("bilinear", 16), slopes("linear", 20), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_place_that_is_no_number_has_a_gradient_that_is_none() -> None:
    case = Case("", "y=GridSample[mode=linear](x,g)", IMAGE)
    feed = case.feed()
    feed["g"][0, 0, 0] = np.nan
    made = gradients(case.model(20), "loss", ["x", "g"]).to_proto()
    (found,) = run_float32(made, feed, ["g_grad"])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(feed["g"]))


def test_cubic_interpolation_is_refused() -> None:
    model = Case("", "y=GridSample[mode=cubic](x,g)", IMAGE).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["x"])
    assert str(caught.value) == (
        "node 'y' (GridSample): no gradient with mode 'cubic', only with linear and nearest; change the mode"
    )
