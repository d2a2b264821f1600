"""Gradients of reductions and running sums."""

from support.train.vjp_case import Case, judged

AXES = {"the last axis": [-1], "one axis": [1], "two axes": [0, 2]}
OPS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum")
OPS += ("ReduceLogSumExp", "ReduceProd")
SHAPE = (2, 3, 4)
CASES = (
    *(
        Case(
            f"{op} over {name}, keepdims {keep}",
            f"y={op}[keepdims={keep}](x,axes)",
            {"x": SHAPE},
            constants={"axes": axes},
            low=0.5 if op == "ReduceLogSum" else -2.0,
            opsets=(18,),
        )
        for op in OPS
        for (name, axes), keep in zip(AXES.items(), (0, 1, 0), strict=True)
    ),
    *(
        Case(
            f"{op} by attribute, keepdims {keep}",
            f"y={op}[keepdims={keep},axes=-1 0](x)",
            {"x": SHAPE},
            low=0.5 if op == "ReduceLogSum" else -2.0,
            opsets=(16, 17),
        )
        for op in OPS
        if op != "ReduceSum"
        for keep in (0, 1)
    ),
    *(
        Case(f"{op} of all, keepdims {keep}", f"y={op}[keepdims={keep}](x)", {"x": (2, 3)}, low=0.5, opsets=(16, 20))
        for op in OPS
        for keep in (0, 1)
    ),
    *(
        Case(f"{op} over no axes", f"y={op}[noop_with_empty_axes=1](x)", {"x": (2, 3)}, low=0.5)
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd")
    ),
    *(
        Case(f"{op} over axes from an input", f"y={op}(x,axes)", {"x": SHAPE, "axes": (2,)}, types={"axes": "int"},
             values={"axes": [0, -1]}, low=0.5)
        for op in OPS
    ),
    *(Case(f"{op} without rows", f"y={op}(x,axes)", {"x": (0, 3)}, constants={"axes": [1]}) for op in
      ("ReduceSum", "ReduceMean")),
    Case("ReduceSum over an empty axis", "q=Mul(x,x);y=ReduceSum(q,axes)", {"x": (0, 3)}, constants={"axes": [0]}),
    *(
        Case(f"ReduceProd with {n} zeros", "y=ReduceProd(x,axes)", {"x": (n + 1, 3)}, constants={"axes": [1]},
             values={"x": [[0.0] * min(k, 3) + [2.0, 3.0, 0.5][k:] for k in range(n + 1)]})
        for n in (1, 2, 3)
    ),
    *(
        Case(f"CumSum, exclusive {e}, reverse {r}", f"y=CumSum[exclusive={e},reverse={r}](x,axis)", {"x": (3, 4)},
             constants={"axis": [1]})
        for e in (0, 1)
        for r in (0, 1)
    ),
    Case("ReduceMax of equal numbers", "y=ReduceMax(x,a)", {"x": (2, 3)},
         values={"x": [[1, 2, 2], [3, 3, 3]]}, constants={"a": [1]},
         kink=True, torch=lambda t, x: x.amax(1, keepdim=True)),
    Case("ReduceMin of equal numbers", "y=ReduceMin(x,a)", {"x": (2, 3)},
         values={"x": [[1, 1, 2], [3, 3, 3]]}, constants={"a": [1]},
         kink=True, torch=lambda t, x: x.amin(1, keepdim=True)),
    Case("ReduceL2 at the origin", "y=ReduceL2(x,a)", {"x": (2, 2)}, values={"x": [[0, 0], [3, 4]]},
         constants={"a": [1]}, kink=True, torch=lambda t, x: t.linalg.vector_norm(x, 2, 1, keepdim=True)),
    Case("ReduceProd of equal numbers", "y=ReduceProd(x,a)", {"x": (3, 3)},
         values={"x": [[0, 1, 2], [0, 0, 3], [4, 2, 1]]}, constants={"a": [1]},
         kink=True, torch=lambda t, x: x.prod(1, keepdim=True)),
)  # fmt: skip

TestRules = judged(CASES)
