"""Gradients of operators that move elements, or change shapes."""

import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged

INT = {"i": "int"}


def gather(name: str, graph: str, x: tuple[int, ...], i: object, shape: tuple[int, ...], torch: object = None) -> Case:
    return Case(name, graph, {"x": x, "i": shape}, types=INT, values={"i": i}, opsets=(16, 20), torch=torch)  # type: ignore[arg-type]


CASES = (
    gather("Gather of rows", "y=Gather(x,i)", (4, 3), [2, 0, 2], (3,), lambda t, x, i: x[i]),
    gather("Gather of a matrix of rows", "y=Gather(x,i)", (4, 3), [[2, 0], [-1, 2]], (2, 2), lambda t, x, i: x[i]),
    gather("Gather along the last axis", "y=Gather[axis=-1](x,i)", (2, 3, 4), [[3, -1], [0, 1]], (2, 2),
           lambda t, x, i: x[:, :, i]),
    gather("Gather of one column", "y=Gather[axis=1](x,i)", (4, 3), 2, (), lambda t, x, i: x[:, i]),
    Case("Gather of a constant row", "y=Gather(x,i)", {"x": (4, 3)}, constants={"i": 1}),
    gather("GatherElements", "y=GatherElements[axis=1](x,i)", (2, 4), [[1, 1, 0], [3, 2, 3]], (2, 3),
           lambda t, x, i: x.gather(1, i)),
    gather("GatherND", "y=GatherND(x,i)", (2, 4, 3), [[0, 1], [1, 3], [0, 1]], (3, 2),
           lambda t, x, i: x[i[:, 0], i[:, 1]]),
    gather("GatherND of single elements", "y=GatherND(x,i)", (2, 4), [[0, 1], [1, -1]], (2, 2),
           lambda t, x, i: x[i[:, 0], i[:, 1]]),
    gather("GatherND with a batch", "y=GatherND[batch_dims=1](x,i)", (2, 4, 3), [[[1]], [[3]]], (2, 1, 1),
           lambda t, x, i: t.stack([x[0][i[0, 0]], x[1][i[1, 0]]])),
    Case("ScatterND", "y=ScatterND(x,i,u)", {"x": (4, 3), "i": (2, 1), "u": (2, 3)}, types=INT,
         values={"i": [[2], [0]]}, torch=lambda t, x, i, u: x.index_put((i[:, 0],), u)),
    Case("ScatterND that adds", "y=ScatterND[reduction=add](x,i,u)", {"x": (4, 3), "i": (3, 1), "u": (3, 3)},
         types=INT, values={"i": [[2], [0], [2]]}, opsets=(16, 20)),
    Case("ScatterElements", "y=ScatterElements[axis=1](x,i,u)", {"x": (2, 4), "i": (2, 2), "u": (2, 2)}, types=INT,
         values={"i": [[1, 3], [0, 2]]}, torch=lambda t, x, i, u: x.scatter(1, i, u)),
    Case("ScatterElements that adds", "y=ScatterElements[axis=0,reduction=add](x,i,u)",
         {"x": (3, 2), "i": (2, 2), "u": (2, 2)}, types=INT, values={"i": [[1, 0], [1, 2]]}, opsets=(16, 20)),

    *(
        Case(f"ScatterElements, the {word}", f"y=ScatterElements[axis=1,reduction={word}](x,i,u)",
             {"x": (2, 4), "i": (2, 3), "u": (2, 3)}, types=INT, values={"i": [[1, 3, 1], [0, 2, 0]]}, opsets=(18, 20))
        for word in ("max", "min")
    ),
    Case("ScatterElements, equal numbers", "y=ScatterElements[axis=0,reduction=max](x,i,u)",
         {"x": (3,), "i": (4,), "u": (4,)}, types=INT, values={"x": [1, 2, 3], "i": [0, 0, 1, 2], "u": [1, 1, 2, 0]},
         opsets=(18,), kink=True, torch=lambda t, x, i, u: x.scatter_reduce(0, i, u, "amax")),
    Case("ScatterND, the max", "y=ScatterND[reduction=max](x,i,u)",
         {"x": (4, 3), "i": (3, 1), "u": (3, 3)}, types=INT, values={"i": [[2], [0], [2]]}, opsets=(18, 20)),
    Case("Slice", "y=Slice(x,s,e,a)", {"x": (4, 5)}, constants={"s": [1], "e": [4], "a": [1]}, opsets=(16, 20)),
    Case("Slice of two axes, with ends out of range", "y=Slice(x,s,e)", {"x": (4, 5)},
         constants={"s": [1, -99], "e": [99, 2]}, torch=lambda t, x: x[1:, :2]),
    Case("Slice of nothing", "y=Slice(x,s,e)", {"x": (4, 5)}, constants={"s": [3], "e": [1]}),
    Case("Slice in steps", "y=Slice(x,s,e,a,t)", {"x": (4, 7)},
         constants={"s": [1], "e": [7], "a": [1], "t": [2]}, torch=lambda t, x: x[:, 1:7:2]),
    Case("Slice backwards", "y=Slice(x,s,e,a,t)", {"x": (4, 5)},
         constants={"s": [-1], "e": [-99], "a": [1], "t": [-1]}, torch=lambda t, x: x.flip(1)),
    Case("Slice from an input's start", "y=Slice(x,s,e)", {"x": (4, 5), "s": (1,)}, constants={"e": [3]},
         types={"s": "int"}, values={"s": [1]}),
    Case("Pad", "y=Pad(x,p)", {"x": (2, 3)}, constants={"p": [0, 1, 2, 1]}, opsets=(16, 20)),
    Case("Pad with negative pads", "y=Pad(x,p)", {"x": (3, 4)}, constants={"p": [-1, 1, 0, -2]}, linear=True),

    Case("Pad with an input as its value", "y=Pad(x,p,c)", {"x": (2, 3), "c": ()}, constants={"p": [0, 1, 2, 1]}),
    Case("Pad some axes", "y=Pad(x,p,,a)", {"x": (2, 3, 4)}, constants={"p": [1, 2], "a": [-2]}),
    Case("Pad with pads from an input", "y=Pad(x,p)", {"x": (2, 3), "p": (4,)}, types={"p": "int"},
         values={"p": [0, 1, 2, 1]}),
    *(
        Case(f"Pad, {mode}", f"y=Pad[mode={mode}](x,p)", {"x": (3, 4)}, constants={"p": [1, 2, 1, 1]}, opsets=(19,))
        for mode, torch in (("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular"))
    ),
    Case("Compress", "y=Compress[axis=1](x,c)", {"x": (2, 4), "c": (4,)}, types={"c": "bool"},
         values={"c": [1, 0, 0, 1]}),
    Case("Compress of all", "y=Compress(x,c)", {"x": (2, 2), "c": (3,)}, types={"c": "bool"}, values={"c": [1, 0, 1]}),
    Case("ReverseSequence", "y=ReverseSequence[batch_axis=0,time_axis=1](x,i)", {"x": (2, 4), "i": (2,)}, types=INT,
         values={"i": [3, 2]}),
    Case("OneHot of two values", "y=OneHot(i,d,x)", {"i": (4,), "x": (2,)}, types=INT, values={"i": [0, 2, -1, 5]},
         constants={"d": 3}),
    Case("TopK", "y,n=TopK(x,k)", {"x": (3, 5)}, constants={"k": [2]}, torch=lambda t, x: x.topk(2)[0]),
    # -- shapes
    Case("Reshape", "y=Reshape(x,s)", {"x": (2, 3, 4)}, constants={"s": [4, -1]}, opsets=(16, 20)),
    Case("Reshape of nothing", "y=Reshape[allowzero=1](x,s)", {"x": (2, 0, 4)}, constants={"s": [0, 3]}),
    Case("Flatten", "y=Flatten[axis=2](x)", {"x": (2, 3, 4)}, torch=lambda t, x: x.reshape(6, 4)),
    Case("Squeeze", "y=Squeeze(x,a)", {"x": (2, 1, 4, 1)}, constants={"a": [1]}, torch=lambda t, x: x.squeeze(1)),
    Case("Unsqueeze", "y=Unsqueeze(x,a)", {"x": (2, 3)}, constants={"a": [0, -1]}),
    Case("Transpose", "y=Transpose[perm=2 0 1](x)", {"x": (2, 3, 4)}, torch=lambda t, x: x.permute(2, 0, 1)),
    Case("Expand", "y=Expand(x,s)", {"x": (3, 1)}, constants={"s": [2, 3, 4]}, torch=lambda t, x: x.expand(2, 3, 4)),
    Case("Expand to a shape from an input", "y=Expand(x,s)", {"x": (3, 1), "s": (3,)}, types={"s": "int"},
         values={"s": [2, 1, 4]}),
    Case("Concat", "y=Concat[axis=1](a,b,c)", {"a": (2, 1), "b": (2, 3), "c": (2, 0)}, opsets=(16, 20)),
    Case("Concat along a negative axis", "y=Concat[axis=-2](a,b)", {"a": (2, 1, 3), "b": (2, 3, 3)}),
    Case("Concat of one value twice", "y=Concat[axis=0](a,a)", {"a": (2, 3)}, torch=lambda t, a: t.cat([a, a])),
    Case("Split", "y,z=Split[axis=1](x,s)", {"x": (2, 5)}, outputs=("y", "z"), constants={"s": [2, 3]}),
    Case("Split with one part used", "p,y,q=Split[axis=-1](x,s)", {"x": (2, 6)}, constants={"s": [1, 2, 3]}),
    Case("Split into equal parts", "y,z=Split[axis=0](x)", {"x": (4, 2)}, outputs=("y", "z"), opsets=(16, 17)),
    Case("Split into a number of parts", "y,z=Split[axis=0,num_outputs=2](x)", {"x": (5, 2)}, outputs=("y", "z"),
         opsets=(18, 20), torch=lambda t, x: x.split([3, 2])),
    Case("Tile", "y=Tile(x,r)", {"x": (2, 3)}, constants={"r": [2, 3]}, torch=lambda t, x: x.tile(2, 3)),
    Case("Tile of three axes", "y=Tile(x,r)", {"x": (2, 1, 3)}, constants={"r": [2, 3, 1]}),
    Case("Tile with repeats from an input", "y=Tile(x,r)", {"x": (2, 3), "r": (2,)}, types={"r": "int"},
         values={"r": [2, 3]}),
    Case("Concat of one", "y=Concat[axis=0](a)", {"a": (2, 3)}),
    Case("DepthToSpace", "y=DepthToSpace[blocksize=3](x)", {"x": (1, 18, 1, 2)}),
    Case("DepthToSpace, CRD", "y=DepthToSpace[blocksize=3,mode=CRD](x)", {"x": (1, 18, 1, 2)}),
    Case("SpaceToDepth", "y=SpaceToDepth[blocksize=3](x)", {"x": (1, 2, 3, 6)}),
    *(
        Case(f"{op} of the input, times 0", f"r={op}(x);n=Mul(r,zero);y=Add(n,x)", {"x": (2, 3)},
             constants={"zero": 0.0})
        for op in ("EyeLike", "RandomNormalLike", "RandomUniformLike")
    ),
    Case("Trilu, upper", "y=Trilu(x,k)", {"x": (2, 3, 4)}, constants={"k": 1}, torch=lambda t, x: x.triu(1)),
    Case("Trilu, lower", "y=Trilu[upper=0](x)", {"x": (3, 3)}, torch=lambda t, x: x.tril()),
)  # fmt: skip

TestRules = judged(CASES)


def test_a_product_of_scattered_duplicates_is_refused() -> None:
    shapes = {"x": (3,), "i": (2,), "u": (2,)}
    model = Case("", "y=ScatterElements[reduction=mul](x,i,u)", shapes, types=INT, values={"i": [0, 1]}).model(18)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["x"])
    assert str(caught.value) == (
        "node 'y' (ScatterElements): reduction 'mul' has no gradient rule; use none, add, max or min"
    )
