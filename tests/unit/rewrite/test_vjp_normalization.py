"""Gradients of softmax, label losses, normalizations and Dropout."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from amp_rewrite import gradients
from support.cases import build
from support.train.vjp_case import Case, judged, run_float32

REDUCTIONS = ("none", "sum", "mean")
LABELS = [2, 0, 1, 2]
SPATIAL = [[2, 0], [1, 1], [0, 2]]


WEIGHTS = [0.5, 2.0, 0.75]


def losses(op: str, torch_op: str) -> Iterator[Case]:
    """Yield losses with class weights and an ignored index, over classes and over pixels, for each reduction."""
    options: dict[str, Any] = {"types": {"t": "int"}, "constants": {"w": WEIGHTS}}
    for reduction in REDUCTIONS:
        yield Case(
            f"{op}, {reduction}",
            f"y={op}[reduction={reduction},ignore_index=-1](x,t,w)",
            {"x": (4, 3), "t": (4,)},
            values={"t": [2, -1, 1, 2]},
            **options,
        )
        yield Case(
            f"{op} over pixels, {reduction}",
            f"y={op}[reduction={reduction},ignore_index=1](x,t,w)",
            {"x": (3, 3, 2), "t": (3, 2)},
            values={"t": SPATIAL},
            **options,
        )


CHANNELS = {"s": (3,), "b": (3,), "m": (3,), "v": (3,)}
POSITIVE = {"v": [0.5, 1.25, 2.0]}
# onnxruntime overwrites the running statistics in its inputs.
BATCH = (
    "c=ReduceMean(x,over);d=Sub(x,c);q=Mul(d,d);e=ReduceMean(q,over);f=Add(e,eps);g=Sqrt(f);h=Div(d,g);"
    "s2=Unsqueeze(s,last);b2=Unsqueeze(b,last);i=Mul(h,s2);y=Add(i,b2);"
    "c1=Reshape(c,flat);e1=Reshape(e,flat);cn=Mul(c1,new);en=Mul(e1,new);mo=Mul(m,old);vo=Mul(v,old);n=Add(mo,cn);"
    "w=Add(vo,en)"
)
IN_BATCH = {"over": [0, 2], "eps": 0.25, "last": [1], "flat": [-1], "new": 0.25, "old": 0.75}


def in_groups(model: onnx.ModelProto) -> None:
    """Turn the node into a GroupNormalization, for which onnx cannot infer the types that `build` declares."""
    node = model.graph.node[0]
    node.op_type = "GroupNormalization"
    node.attribute.append(onnx.helper.make_attribute("num_groups", 2))


CASES = (
    *(
        Case(f"{op} along {axis}", f"y={op}[axis={axis}](x)", {"x": (2, 3, 4)}, opsets=(16, 20))
        for op, f in (("Softmax", lambda t: t.softmax), ("LogSoftmax", lambda t: t.log_softmax))
        for axis in (-1, 1, 0)
    ),
    Case("Hardmax and the input itself", "h=Hardmax(x);y=Mul(h,x)", {"x": (2, 3)}),
    Case("Softmax of one class", "y=Softmax(x)", {"x": (3, 1)}),
    *losses("NegativeLogLikelihoodLoss", "nll_loss"),
    *losses("SoftmaxCrossEntropyLoss", "cross_entropy"),
    Case("a loss and its log-probabilities", "y,z=SoftmaxCrossEntropyLoss(x,t)", {"x": (4, 3), "t": (4,)},
         types={"t": "int"}, values={"t": LABELS}, outputs=("y", "z")),
    Case("only log-probabilities", "p,y=SoftmaxCrossEntropyLoss(x,t)", {"x": (4, 3), "t": (4,)},
         types={"t": "int"}, values={"t": LABELS}, torch=lambda t, x, labels: x.log_softmax(1)),
    Case("by class weights", "y=SoftmaxCrossEntropyLoss[ignore_index=1](x,t,w)", {"x": (4, 3), "t": (4,), "w": (3,)},
         types={"t": "int"}, values={"t": LABELS}, low=0.5, opsets=(16, 20)),
    Case("LayerNormalization", "y=LayerNormalization(x,s,b)", {"x": (2, 3, 4), "s": (4,), "b": (4,)}, opsets=(17, 20)),
    Case("LayerNormalization over two axes", "y=LayerNormalization[axis=1,epsilon=0.25](x,s,b)",
         {"x": (2, 3, 4), "s": (3, 4), "b": (3, 4)}),
    Case("LayerNormalization without a bias", "y=LayerNormalization(x,s)", {"x": (2, 4), "s": (4,)}),
    Case("RMSNormalization", "y=RMSNormalization(x,s)", {"x": (2, 3, 4), "s": (4,)}, opsets=(23,)),
    Case("InstanceNormalization", "y=InstanceNormalization[epsilon=0.25](x,s,b)",
         {"x": (2, 3, 4), "s": (3,), "b": (3,)}),
    Case("GroupNormalization", "y=InstanceNormalization[epsilon=0.25](x,s,b)",
         {"x": (2, 4, 3), "s": (4,), "b": (4,)}, opsets=(21,), change=in_groups, single=True,
         constants={"over": [2], "eps": 0.25, "last": [1], "to": [2, 2, -1], "back": [2, 4, 3]},
         meaning="r=Reshape(x,to);c=ReduceMean(r,over);d=Sub(r,c);q=Mul(d,d);e=ReduceMean(q,over);f=Add(e,eps);"
         "g=Sqrt(f);h=Div(d,g);k=Reshape(h,back);s2=Unsqueeze(s,last);b2=Unsqueeze(b,last);i=Mul(k,s2);y=Add(i,b2)"),
    Case("MeanVarianceNormalization", "y=MeanVarianceNormalization[axes=0 2 3](x)", {"x": (2, 3, 4, 2)},
         single=True, constants={"over": [0, 2, 3], "eps": 1e-9},
         meaning="c=ReduceMean(x,over);d=Sub(x,c);q=Mul(d,d);e=ReduceMean(q,over);g=Sqrt(e);f=Add(g,eps);y=Div(d,f)"),
    Case("BatchNormalization with running statistics", "y=BatchNormalization[epsilon=0.25](x,s,b,m,v)",
         {"x": (4, 3, 2), **CHANNELS}, values=POSITIVE),
    Case("BatchNormalization of features", "y=BatchNormalization(x,s,b,m,v)", {"x": (4, 3), **CHANNELS},
         values=POSITIVE),
    Case("BatchNormalization with the statistics of the batch",
         "y,n,w=BatchNormalization[epsilon=0.25,training_mode=1](x,s,b,m,v)",
         {"x": (4, 3, 2), **CHANNELS}, wrt=("x", "s", "b"), values=POSITIVE, opsets=(18, 20), meaning=BATCH,
         constants=IN_BATCH),
    Case("BatchNormalization with its statistics as outputs",
         "y,n,w=BatchNormalization[epsilon=0.25,training_mode=1,momentum=0.75](x,s,b,m,v)",
         {"x": (4, 3, 2), **CHANNELS}, values=POSITIVE, outputs=("y", "n", "w"), meaning=BATCH,
         constants=IN_BATCH),

    *(
        Case(f"LpNormalization, p = {p}", f"y=LpNormalization[p={p},axis=1](x)", {"x": (2, 3, 4)})
        for p in (1, 2)
    ),
    Case("Dropout with its mode from an input", "y=Dropout(x,r,t)", {"x": (3, 4), "t": ()}, types={"t": "bool"},
         constants={"r": 0.25}, values={"t": False}),
)  # fmt: skip

TestRules = judged(CASES)


@pytest.mark.parametrize("training", ["a constant", "an input", "a false input"])
@pytest.mark.parametrize("ratio", [None, 0.25])
def test_dropout_passes_the_kept_gradient_scaled_like_the_value(training: str, ratio: float | None) -> None:
    drops = training != "a false input"
    model = build(
        f"y,mask=Dropout[seed=5](x,{'r' if ratio else ''},t);z=Mul(y,w);loss=ReduceSum[keepdims=0](z)",
        ["loss", "mask"],
        shapes={"x": (20, 20), "w": (20, 20), "t": (), "loss": (), "mask": (20, 20)},
        types={"t": "bool"},
        constants={"r": np.float32(ratio), "t": np.array(True)} if training == "a constant" else {"r": ratio or 0.5},
    )
    rng = np.random.default_rng(1)
    feed = {"x": rng.normal(size=(20, 20)), "w": rng.normal(size=(20, 20))}
    feed = {name: array.astype(np.float32) for name, array in feed.items()}
    if training != "a constant":
        feed["t"] = np.array(drops)
    mask, gradient = run_float32(gradients(model, "loss", ["x"]).to_proto(), feed, ["mask", "x_grad"])
    share = 1 - (ratio or 0.5)
    assert drops == (0 < mask.mean() < 1)
    np.testing.assert_allclose(gradient, np.where(mask, feed["w"] / (share if drops else 1), 0), rtol=1e-6)
