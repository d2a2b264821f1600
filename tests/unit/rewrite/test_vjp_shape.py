"""Gradients of operators that change shapes."""

from __future__ import annotations

from support.train.vjp_case import Case, judged

CASES = (
    Case("Reshape", "y=Reshape(x,s)", {"x": (2, 3, 4)}, constants={"s": [4, -1]}, opsets=(13, 20),
         torch=lambda t, x: x.reshape(4, -1)),
    Case("Reshape that copies a dim", "y=Reshape(x,s)", {"x": (2, 3, 4)}, constants={"s": [0, 12]}),
    Case("Reshape of nothing", "y=Reshape[allowzero=1](x,s)", {"x": (2, 0, 4)}, constants={"s": [0, 3]}),
    Case("Flatten", "y=Flatten[axis=2](x)", {"x": (2, 3, 4)}, torch=lambda t, x: x.reshape(6, 4)),
    Case("Squeeze", "y=Squeeze(x,a)", {"x": (2, 1, 4, 1)}, constants={"a": [1]}, torch=lambda t, x: x.squeeze(1)),
    Case("Squeeze of all", "y=Squeeze(x)", {"x": (2, 1, 4, 1)}, torch=lambda t, x: x.squeeze()),
    Case("Unsqueeze", "y=Unsqueeze(x,a)", {"x": (2, 3)}, constants={"a": [0, -1]},
         torch=lambda t, x: x[None, ..., None]),
    Case("Transpose", "y=Transpose[perm=2 0 1](x)", {"x": (2, 3, 4)}, torch=lambda t, x: x.permute(2, 0, 1)),
    Case("Transpose that reverses", "y=Transpose(x)", {"x": (2, 3, 4)}, torch=lambda t, x: x.permute(2, 1, 0)),
    Case("Expand", "y=Expand(x,s)", {"x": (3, 1)}, constants={"s": [2, 3, 4]}, torch=lambda t, x: x.expand(2, 3, 4)),
    Case("Expand by ones", "y=Expand(x,s)", {"x": (3, 4)}, constants={"s": [1, 1]}),
    Case("Expand to a shape that is fed", "y=Expand(x,s)", {"x": (3, 1), "s": (3,)}, types={"s": "int"},
         values={"s": [2, 1, 4]}),
    Case("Concat", "y=Concat[axis=1](a,b,c)", {"a": (2, 1), "b": (2, 3), "c": (2, 0)}, opsets=(13, 20),
         torch=lambda t, a, b, c: t.cat([a, b, c], 1)),
    Case("Concat from the back", "y=Concat[axis=-2](a,b)", {"a": (2, 1, 3), "b": (2, 3, 3)}),
    Case("Concat of one", "y=Concat[axis=0](a)", {"a": (2, 3)}),
    Case("Concat of one value twice", "y=Concat[axis=0](a,a)", {"a": (2, 3)}, torch=lambda t, a: t.cat([a, a])),
    Case("Split", "y,z=Split[axis=1](x,s)", {"x": (2, 5)}, outputs=("y", "z"), constants={"s": [2, 3]},
         torch=lambda t, x: x.split([2, 3], 1)),
    Case("Split of which one part is used", "p,y,q=Split[axis=-1](x,s)", {"x": (2, 6)}, constants={"s": [1, 2, 3]},
         torch=lambda t, x: x.split([1, 2, 3], 1)[1]),
    Case("Split into equal parts", "y,z=Split[axis=0](x)", {"x": (4, 2)}, outputs=("y", "z"), opsets=(13, 17)),
    Case("Split into a number of parts", "y,z=Split[axis=0,num_outputs=2](x)", {"x": (5, 2)}, outputs=("y", "z"),
         opsets=(18, 20), torch=lambda t, x: x.split([3, 2])),
    Case("Tile", "y=Tile(x,r)", {"x": (2, 3)}, constants={"r": [2, 3]}, torch=lambda t, x: x.tile(2, 3)),
    Case("Tile by one", "y=Tile(x,r)", {"x": (2, 3)}, constants={"r": [1, 2]}),
    Case("Tile of three axes", "y=Tile(x,r)", {"x": (2, 1, 3)}, constants={"r": [2, 3, 1]}),
    Case("Tile of a dim of 1", "y=Tile(x,r)", {"x": (1, 3)}, constants={"r": [3, 1]}),
    Case("Tile by a number that is fed", "y=Tile(x,r)", {"x": (2, 3), "r": (2,)}, types={"r": "int"},
         values={"r": [2, 3]}),
    Case("DepthToSpace", "y=DepthToSpace[blocksize=3](x)", {"x": (1, 18, 1, 2)}),
    Case("DepthToSpace, CRD", "y=DepthToSpace[blocksize=3,mode=CRD](x)", {"x": (1, 18, 1, 2)},
         torch=lambda t, x: t.nn.functional.pixel_shuffle(x, 3)),
    Case("SpaceToDepth", "y=SpaceToDepth[blocksize=3](x)", {"x": (1, 2, 3, 6)}),
    *(
        Case(f"{op} of the input, not counted", f"r={op}(x);n=Mul(r,zero);y=Add(n,x)", {"x": (2, 3)},
             constants={"zero": 0.0})
        for op in ("EyeLike", "RandomNormalLike", "RandomUniformLike")
    ),
    Case("Trilu, upper", "y=Trilu(x,k)", {"x": (2, 3, 4)}, constants={"k": 1}, torch=lambda t, x: x.triu(1)),
    Case("Trilu, lower", "y=Trilu[upper=0](x)", {"x": (3, 3)}, torch=lambda t, x: x.tril()),
)  # fmt: skip

TestRules = judged(CASES)
