"""Gradients of matrix products, of Einsum and of Resize."""

import numpy as np
import onnx.parser
import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, Torch, judged, run_float32

SIZES = dict(zip("bhijkl", (2, 3, 3, 4, 2, 5), strict=True))


def einsum(equation: str, *shapes: tuple[int, ...], name: str = "") -> Case:
    """Return a case of an Einsum of operands a, b, c."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    dims = shapes or [tuple(SIZES[label] for label in term) for term in terms]
    operands = dict(zip("abc", dims, strict=False))
    torch: Torch = lambda t, *operands: t.einsum(equation, *operands)  # noqa: E731
    text = f'y = Einsum <equation = "{equation}"> ({", ".join(operands)})'
    return Case(name or equation, "", operands, text=text, torch=torch)


X = {"x": (1, 2, 4, 4)}
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def by_scales(settings: str, *scales: float, name: str = "", **options: object) -> Case:
    return Case(
        name or f"{settings}, {scales}",
        f"y=Resize[{settings}](x,,s)",
        X,
        constants={"s": [1.0, 1.0, *scales]},
        linear=True,
        **options,
    )  # type: ignore[arg-type]


def by_sizes(mode: str, *sizes: int, **options: object) -> Case:
    return Case(
        f"{mode}, to {sizes}", f"y=Resize[{mode}](x,,,z)", X, constants={"z": [1, 2, *sizes]}, linear=True, **options
    )  # type: ignore[arg-type]


PRODUCTS = {
    "matrix by matrix": ((3, 4), (4, 2)),
    "batch by batch": ((2, 3, 4), (2, 4, 2)),
    "one matrix by a batch": ((3, 4), (2, 4, 2)),
    "broadcast batches": ((2, 1, 3, 4), (5, 4, 2)),
    "vector by vector": ((4,), (4,)),
    "vector by matrix": ((4,), (4, 2)),
    "matrix by vector": ((3, 4), (4,)),
    "batch by vector": ((2, 3, 4), (4,)),
    "an empty batch by one matrix": ((0, 3, 4), (4, 2)),
    "nothing to sum over": ((2, 3, 0), (0, 2)),
}
GEMMS = {
    (ta, tb): Case(
        f"Gemm, transA {ta}, transB {tb}",
        f"y=Gemm[transA={ta},transB={tb},alpha=0.5,beta=1.5](a,b,c)",
        {"a": (4, 3) if ta else (3, 4), "b": (2, 4) if tb else (4, 2), "c": (2,)},
    )
    for ta in (0, 1)
    for tb in (0, 1)
}
CASES = (
    einsum("ij,jk->ik"),
    einsum("bhij,bhkj->bhik"),
    einsum("ij , jk"),
    einsum("ij,ij->"),
    einsum("i,j->ij"),
    einsum("ij,k->i"),
    einsum("ij->ji"),
    einsum("bij,jk,kl->bil"),
    einsum("...ij,jk->...ik", (2, 3, 3, 4), (4, 2)),
    einsum("...ij,...jk->...ik", (2, 1, 3, 4), (1, 5, 4, 2)),
    einsum("ij,jk->ik", (3, 1), (1, 2), name="a sum over one"),
    by_scales("mode=nearest,coordinate_transformation_mode=asymmetric,nearest_mode=floor", 2, 3, opsets=(16, 20)),
    *(
        by_scales(f"mode=nearest,coordinate_transformation_mode={c},nearest_mode={n}", 1.5, 0.75)
        for c, n in zip(COORDINATES, ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"), strict=True)
    ),
    *(
        by_scales(f"mode={mode},coordinate_transformation_mode={c}", 2, 1.5)
        for mode in ("linear", "cubic")
        for c in (*COORDINATES, "half_pixel_symmetric")
        if (mode, c) != ("cubic", "half_pixel_symmetric")
    ),
    by_scales("mode=linear", 0.5, 0.75, name="linear, smaller"),
    by_sizes("mode=linear,coordinate_transformation_mode=align_corners", 5, 6),
    by_sizes("mode=cubic,coordinate_transformation_mode=half_pixel", 5, 6),
    by_scales("mode=cubic,exclude_outside=1,cubic_coeff_a=-0.5", 2, 1.5, name="cubic with exclude_outside"),
    *(by_scales(f"mode={mode},antialias=1", 0.5, 0.75) for mode in ("linear", "cubic")),
    Case("named axes", "y=Resize[mode=linear,axes=3](x,,s)", X, constants={"s": [1.5]}),
    Case("one axis of three", "y=Resize[mode=linear](x,,s)", {"x": (2, 2, 3)}, constants={"s": [1.0, 1.0, 2.0]}),
    Case("to the size of another value",
         "d=Shape[start=2](o); r=Shape[end=2](x); z=Concat[axis=0](r,d); y=Resize[mode=linear](x,,,z)",
         {**X, "o": (1, 2, 7, 3)}, wrt=["x"]),
    *(
        Case(f"MatMul {name}", "y=MatMul(a,b)", {"a": a, "b": b}, torch=lambda t, a, b: t.matmul(a, b))
        for name, (a, b) in PRODUCTS.items()
    ),
    *GEMMS.values(),
    Case("Gemm without C", "y=Gemm(a,b)", {"a": (3, 4), "b": (4, 2)}),
    *(
        Case(f"Gemm with C of {c}", "y=Gemm(a,b,c)", {"a": (3, 4), "b": (4, 2), "c": c})
        for c in ((), (1,), (3, 1), (1, 2), (3, 2))
    ),
    Case("Gemm without rows", "y=Gemm(a,b,c)", {"a": (0, 4), "b": (4, 2), "c": (2,)}),
    Case("one matrix in two products", "h=MatMul(x,w);y=MatMul(h,w)", {"x": (3, 4), "w": (4, 4)}),
)  # fmt: skip

TestRules = judged(CASES)


def test_a_diagonal_is_refused() -> None:
    model = einsum("ii->i", (3, 3)).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'Einsum_0' (Einsum): the diagonal of an operand in 'ii->i' has no gradient rule; replace the op"
    )


def test_a_resize_that_keeps_its_aspect_ratio_is_refused() -> None:
    model = by_sizes("mode=linear,keep_aspect_ratio_policy=not_larger", 5, 6).model(20)
    with pytest.raises(GradientError, match="tf_crop_and_resize and keep_aspect_ratio_policy have no gradient rule"):
        gradients(model, "loss", ["x"])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_fed_scales_give_the_gradient_of_constant_ones(mode: str) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> net (float[{dims}] x{more}) => (float loss) {constant} {{
      y = Resize <mode = "{mode}"> (x, , s)  q = Mul (y, y)  loss = ReduceSum <keepdims = 0> (q) }}"""
    from_input = text.format(dims="1,1,H,W", more=", float[4] s", constant="", mode=mode)
    constant = text.format(dims="1,1,3,4", more="", constant="<float[4] s = {1, 1, 2, 1.5}>", mode=mode)
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4), "s": np.array([1, 1, 2, 1.5], np.float32)}
    grads = [
        run_float32(gradients(onnx.parser.parse_model(model), "loss", ["x"]).to_proto(), read, ["x_grad"])[0]
        for model, read in ((from_input, feeds), (constant, {"x": feeds["x"]}))
    ]
    np.testing.assert_allclose(grads[0], grads[1], rtol=1e-6)
