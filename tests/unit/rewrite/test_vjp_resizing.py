"""Gradients of Resize."""

from __future__ import annotations

import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged

X = {"x": (1, 2, 4, 4)}
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def by_scales(words: str, *scales: float, name: str = "", **also: object) -> Case:
    return Case(
        name or f"{words}, {scales}", f"y=Resize[{words}](x,,s)", X, constants={"s": [1.0, 1.0, *scales]}, **also
    )  # type: ignore[arg-type]


def by_sizes(words: str, *sizes: int, **also: object) -> Case:
    return Case(f"{words}, to {sizes}", f"y=Resize[{words}](x,,,z)", X, constants={"z": [1, 2, *sizes]}, **also)  # type: ignore[arg-type]


CASES = (
    by_scales("mode=nearest,coordinate_transformation_mode=asymmetric,nearest_mode=floor", 2, 3, opsets=(13, 20),
              torch=lambda t, x: t.nn.functional.interpolate(x, scale_factor=(2.0, 3.0))),
    by_scales("mode=nearest", 2, 2, name="nearest as it comes"),
    by_scales("mode=nearest", 2, 1, name="nearest along one axis"),
    *(
        by_scales(f"mode=nearest,coordinate_transformation_mode={c},nearest_mode={n}", 1.5, 0.75, fixed=True)
        for c in COORDINATES
        for n in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    *(
        # The judge rounds the weights of a cubic to float32.
        by_scales(f"mode={mode},coordinate_transformation_mode={c}", 2, 1.5, fixed=True, single=mode == "cubic")
        for mode in ("linear", "cubic")
        for c in (*COORDINATES, "half_pixel_symmetric")
        if (mode, c) != ("cubic", "half_pixel_symmetric")
    ),
    by_scales("mode=linear", 0.5, 0.75, name="linear, smaller", fixed=True),
    by_sizes("mode=linear,coordinate_transformation_mode=half_pixel", 5, 6, fixed=True,
             torch=lambda t, x: t.nn.functional.interpolate(x, (5, 6), mode="bilinear")),
    by_sizes("mode=linear,coordinate_transformation_mode=align_corners", 5, 6, fixed=True,
             torch=lambda t, x: t.nn.functional.interpolate(x, (5, 6), mode="bilinear", align_corners=True)),
    by_sizes("mode=cubic,coordinate_transformation_mode=half_pixel", 5, 6, fixed=True, single=True,
             torch=lambda t, x: t.nn.functional.interpolate(x, (5, 6), mode="bicubic")),
    by_sizes("mode=nearest,coordinate_transformation_mode=asymmetric,nearest_mode=floor", 5, 6, fixed=True,
             torch=lambda t, x: t.nn.functional.interpolate(x, (5, 6))),
    by_scales("mode=cubic,exclude_outside=1,cubic_coeff_a=-0.5", 2, 1.5, name="cubic without an outside", fixed=True,
              single=True),
    Case("named axes", "y=Resize[mode=linear,axes=3](x,,s)", X, constants={"s": [1.5]}, fixed=True),
    Case("one axis of three", "y=Resize[mode=linear](x,,s)", {"x": (2, 2, 3)}, constants={"s": [1.0, 1.0, 2.0]},
         fixed=True),
)  # fmt: skip

TestRules = judged(CASES)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("mode=linear,antialias=1", "no gradient with antialias 1; set it to 0"),
        (
            "mode=linear,coordinate_transformation_mode=tf_crop_and_resize",
            "no gradient of a crop; use Slice before Resize",
        ),
    ],
)
def test_what_has_no_rule_is_refused(words: str, fact: str) -> None:
    graph = f"y=Resize[{words}](x,r,s)"
    model = Case("", graph, X, constants={"r": [0.0] * 4 + [1.0] * 4, "s": [1.0, 1.0, 2.0, 2.0]}).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["x"])
    assert str(caught.value) == f"node 'y' (Resize): {fact}"
