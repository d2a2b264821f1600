"""Gradients of matrix products."""

from __future__ import annotations

from support.train.vjp_case import Case, judged

PRODUCTS = {
    "matrix by matrix": ((3, 4), (4, 2)),
    "batch by batch": ((2, 3, 4), (2, 4, 2)),
    "batch by one matrix": ((2, 3, 4), (4, 2)),
    "two batch axes by one matrix": ((2, 3, 2, 4), (4, 2)),
    "one matrix by a batch": ((3, 4), (2, 4, 2)),
    "batches that broadcast": ((2, 1, 3, 4), (5, 4, 2)),
    "a batch of 1": ((1, 3, 4), (2, 4, 2)),
    "vector by vector": ((4,), (4,)),
    "vector by matrix": ((4,), (4, 2)),
    "matrix by vector": ((3, 4), (4,)),
    "vector by batch": ((4,), (2, 4, 3)),
    "batch by vector": ((2, 3, 4), (4,)),
    "dims of 1": ((1, 1), (1, 1)),
    "no rows": ((0, 4), (4, 2)),
    "an empty batch by one matrix": ((0, 3, 4), (4, 2)),
    "nothing to sum over": ((2, 3, 0), (0, 2)),
}
GEMMS = {
    (ta, tb): Case(
        f"Gemm, transA {ta}, transB {tb}",
        f"y=Gemm[transA={ta},transB={tb},alpha=0.5,beta=1.5](a,b,c)",
        {"a": (4, 3) if ta else (3, 4), "b": (2, 4) if tb else (4, 2), "c": (2,)},
        torch=lambda t, a, b, c, ta=ta, tb=tb: 0.5 * (a.T if ta else a) @ (b.T if tb else b) + 1.5 * c,
    )
    for ta in (0, 1)
    for tb in (0, 1)
}
CASES = (
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
    Case("Gemm of no rows", "y=Gemm(a,b,c)", {"a": (0, 4), "b": (4, 2), "c": (2,)}),
    Case("one matrix in two products", "h=MatMul(x,w);y=MatMul(h,w)", {"x": (3, 4), "w": (4, 4)},
         torch=lambda t, x, w: x @ w @ w),
)  # fmt: skip

TestRules = judged(CASES)
