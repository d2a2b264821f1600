"""Gradients of softmax and of the losses that score classes."""

from __future__ import annotations

from support.train.vjp_case import Case, judged

REDUCTIONS = ("none", "sum", "mean")
LABELS = [2, 0, 1, 2]
SPATIAL = [[2, 0], [1, 1], [0, 2]]


def losses(op: str, torch_op: str) -> list[Case]:
    """A loss over classes with and without weights, an ignored index and spatial axes, in each reduction."""
    found = []
    for reduction in REDUCTIONS:
        for weighted in (False, True):
            for ignored in (None, 0, -1):
                labels = [2, ignored if ignored is not None else 0, 1, 2]
                words = [f"reduction={reduction}", *([f"ignore_index={ignored}"] if ignored is not None else [])]
                found.append(
                    Case(
                        f"{op}, {reduction}{', weighted' if weighted else ''}, ignoring {ignored}",
                        f"y={op}[{','.join(words)}](x,t{',w' if weighted else ''})",
                        {"x": (4, 3), "t": (4,)},
                        types={"t": "int"},
                        values={"t": labels},
                        constants={"w": [0.5, 2.0, 0.75]} if weighted else {},
                        torch=lambda t, x, labels, op=torch_op, w=weighted, i=ignored, r=reduction: getattr(
                            t.nn.functional, op
                        )(
                            x,
                            labels,
                            weight=t.tensor([0.5, 2.0, 0.75], dtype=t.float64) if w else None,
                            ignore_index=-100 if i is None else i,
                            reduction=r,
                        ),
                    )
                )
        found.append(
            Case(
                f"{op} over pixels, {reduction}",
                f"y={op}[reduction={reduction},ignore_index=1](x,t,w)",
                {"x": (3, 3, 2), "t": (3, 2)},
                types={"t": "int"},
                values={"t": SPATIAL},
                constants={"w": [0.5, 2.0, 0.75]},
            )
        )
    return found


CASES = (
    *(
        Case(f"{op} along {axis}", f"y={op}[axis={axis}](x)", {"x": (2, 3, 4)}, opsets=(13, 20),
             torch=lambda t, x, f=f, axis=axis: f(t)(x, axis))
        for op, f in (("Softmax", lambda t: t.softmax), ("LogSoftmax", lambda t: t.log_softmax))
        for axis in (-1, 1, 0)
    ),
    Case("Hardmax and the input itself", "h=Hardmax(x);y=Mul(h,x)", {"x": (2, 3)}),
    Case("Softmax of one class", "y=Softmax(x)", {"x": (3, 1)}),
    Case("Softmax of no rows", "y=Softmax(x)", {"x": (0, 3)}),
    *losses("NegativeLogLikelihoodLoss", "nll_loss"),
    *losses("SoftmaxCrossEntropyLoss", "cross_entropy"),
    Case("a loss and its log-probabilities", "y,z=SoftmaxCrossEntropyLoss(x,t)", {"x": (4, 3), "t": (4,)},
         types={"t": "int"}, values={"t": LABELS}, outputs=("y", "z"),
         torch=lambda t, x, labels: (t.nn.functional.cross_entropy(x, labels), x.log_softmax(1))),
    Case("log-probabilities alone", "p,y=SoftmaxCrossEntropyLoss(x,t)", {"x": (4, 3), "t": (4,)},
         types={"t": "int"}, values={"t": LABELS}, torch=lambda t, x, labels: x.log_softmax(1)),
    Case("by class weights", "y=SoftmaxCrossEntropyLoss[ignore_index=1](x,t,w)", {"x": (4, 3), "t": (4,), "w": (3,)},
         types={"t": "int"}, values={"t": LABELS}, low=0.5, opsets=(16, 20)),
    Case("of opset 12", "p=Softmax[axis=1](x);y=SoftmaxCrossEntropyLoss(p,t)", {"x": (4, 3), "t": (4,)},
         types={"t": "int"}, values={"t": LABELS}, opsets=(12, 13)),
    Case("the same spelled out", "l=LogSoftmax[axis=1](x);y=NegativeLogLikelihoodLoss(l,t)",
         {"x": (4, 3), "t": (4,)}, types={"t": "int"}, values={"t": LABELS},
         torch=lambda t, x, labels: t.nn.functional.cross_entropy(x, labels)),
)  # fmt: skip

TestRules = judged(CASES)
