"""Gradients of convolutions and poolings."""

from dataclasses import replace
from functools import partial

from support.train.vjp_case import Case, judged


def conv(name: str, settings: str, x: tuple[int, ...], w: tuple[int, ...], op: str = "Conv", *, group: int = 1) -> Case:
    """Return a case of a Conv or a ConvTranspose with a bias."""
    graph = f"y={op}[{settings}](x,w,b)" if settings else f"y={op}(x,w,b)"
    bias = w[1] * group if op == "ConvTranspose" else w[0]
    return Case(f"{op}, {name}", graph, {"x": x, "w": w, "b": (bias,)}, known=("w",), linear=True)


transposed = partial(conv, op="ConvTranspose")
CONV = (
    conv("plain", "", (2, 3, 5, 4), (4, 3, 3, 2)),
    conv("with one axis", "pads=1 1", (2, 3, 6), (2, 3, 3)),
    conv("with three axes", "pads=1 0 1 1 0 1", (1, 2, 4, 3, 4), (2, 2, 3, 2, 3)),
    conv("with strides and a remainder", "strides=2 3,pads=1 1 1 1", (2, 2, 8, 8), (3, 2, 3, 3)),
    conv("with all settings", "strides=2 1,dilations=1 2,pads=1 2 1 2", (2, 2, 6, 5), (3, 2, 3, 3)),
    conv("with uneven pads", "pads=1 0 2 3", (2, 2, 5, 4), (3, 2, 3, 2)),
    conv("in groups", "group=2,pads=1 1 1 1", (2, 4, 4, 4), (6, 2, 3, 3)),
    conv("depthwise", "group=3,strides=2 2", (2, 3, 5, 5), (3, 1, 3, 3)),
    conv("pointwise", "", (2, 3, 4, 4), (5, 3, 1, 1)),
    *(
        conv(f"of {name}, tap by tap", settings, x, w)
        for name, settings, x, w in (
            ("many channels", "pads=1 1 1 1", (2, 9, 4, 5), (3, 9, 3, 3)),
            ("many channels, with all settings", "strides=2 1,dilations=1 2,pads=1 2 1 2", (2, 8, 6, 5), (3, 8, 3, 3)),
            ("many channels, with strides and a remainder", "strides=2 3,pads=1 1 1 1", (2, 8, 8, 8), (3, 8, 3, 3)),
            ("many channels on three axes", "pads=0 1 0 0 1 0", (1, 8, 2, 3, 2), (2, 8, 2, 2, 1)),
            ("pointwise with pads", "pads=1 0 1 0", (2, 3, 3, 4), (4, 3, 1, 1)),
        )
    ),
    # With fixed dims: otherwise onnxruntime 1.31.1 hangs in the convolution that computes this gradient.
    replace(conv("of many channels, no image", "pads=1 1 1 1", (0, 8, 3, 3), (2, 8, 3, 3)), fixed=True),
    conv("of many channels, uneven pads", "pads=1 0 2 3", (2, 8, 5, 4), (3, 8, 3, 2)),
    *(
        replace(conv(mode, f"auto_pad={mode},strides=2 2", (2, 2, 5, 6), (3, 2, 3, 2)), fixed=mode != "VALID")
        for mode in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("Conv without a bias", "y=Conv(x,w)", {"x": (2, 3, 4, 4), "w": (2, 3, 2, 2)}, known=("w",),
         linear=True),
)  # fmt: skip
TRANSPOSED = (
    transposed("plain", "", (2, 3, 4, 3), (3, 2, 3, 2)),
    transposed("with one axis", "strides=2", (2, 3, 4), (3, 2, 3)),
    transposed("with three axes", "pads=1 0 1 1 0 1", (1, 2, 3, 2, 3), (2, 2, 3, 2, 3)),
    transposed("with strides and pads", "strides=2 3,pads=1 1 1 1", (2, 3, 3, 4), (3, 2, 3, 3)),
    transposed("with dilations", "dilations=2 1,strides=1 2", (2, 3, 3, 4), (3, 2, 2, 3)),
    transposed("with output padding", "strides=2 3,output_padding=1 2,pads=1 1 1 1", (2, 3, 3, 3), (3, 2, 3, 3)),
    transposed("of many channels", "strides=2 2,pads=1 1 1 1,output_padding=1 0", (2, 3, 3, 4), (3, 9, 3, 3)),
    transposed("in groups", "group=2,strides=2 2", (2, 4, 3, 3), (4, 3, 2, 2), group=2),
    replace(transposed("with an output shape", "strides=2 2,output_shape=8 7", (2, 3, 4, 3), (3, 2, 3, 3)), fixed=True),
    *(
        replace(transposed(mode, f"auto_pad={mode},strides=2 2", (2, 3, 4, 3), (3, 2, 3, 3)), fixed=True)
        for mode in ("SAME_UPPER", "SAME_LOWER")
    ),
)  # fmt: skip
POOLS = (
    Case("MaxPool", "y=MaxPool[kernel_shape=2 2,strides=2 2](x)", {"x": (2, 3, 4, 6)},
         opsets=(16, 20), torch=lambda t, x: t.nn.functional.max_pool2d(x, 2)),
    Case("MaxPool with overlap and pads", "y=MaxPool[kernel_shape=3 3,strides=2 1,pads=1 1 1 1](x)",
         {"x": (2, 3, 5, 4)}, torch=lambda t, x: t.nn.functional.max_pool2d(x, 3, (2, 1), 1)),
    Case("MaxPool with dilations, rounded up", "y=MaxPool[kernel_shape=2,strides=2,dilations=2,ceil_mode=1](x)",
         {"x": (2, 3, 8)}, torch=lambda t, x: t.nn.functional.max_pool1d(x, 2, 2, 0, 2, True)),
    Case("MaxPool with its indices as an output", "y,n=MaxPool[kernel_shape=2 2](x)", {"x": (1, 2, 3, 3)}),
    Case("AveragePool", "y=AveragePool[kernel_shape=2 2,strides=2 2](x)", {"x": (2, 3, 4, 6)}, linear=True),
    Case("AveragePool with overlap and a remainder", "y=AveragePool[kernel_shape=3 2,strides=2 3](x)",
         {"x": (2, 3, 6, 6)}, linear=True, torch=lambda t, x: t.nn.functional.avg_pool2d(x, (3, 2), (2, 3))),
    Case("AveragePool with counted pads", "y=AveragePool[kernel_shape=3 3,pads=1 1 1 1,count_include_pad=1](x)",
         {"x": (2, 3, 4, 4)}, linear=True, torch=lambda t, x: t.nn.functional.avg_pool2d(x, 3, 1, 1)),
    Case("AveragePool with uncounted pads", "y=AveragePool[kernel_shape=3 3,pads=1 1 1 1,strides=2 2](x)",
         {"x": (2, 3, 4, 5)}, linear=True, fixed=True),
    Case("AveragePool rounded up", "y=AveragePool[kernel_shape=3,strides=2,ceil_mode=1](x)", {"x": (2, 3, 6)},
         linear=True, fixed=True, torch=lambda t, x: t.nn.functional.avg_pool1d(x, 3, 2, 0, True)),
    Case("AveragePool SAME_UPPER", "y=AveragePool[kernel_shape=2 2,auto_pad=SAME_UPPER](x)", {"x": (2, 3, 3, 3)},
         linear=True, fixed=True),
    Case("AveragePool with three axes", "y=AveragePool[kernel_shape=2 2 2](x)", {"x": (1, 2, 3, 3, 3)}, linear=True),
    Case("MaxPool of equal elements", "y=MaxPool[kernel_shape=2 2,strides=1 1](x)", {"x": (1, 1, 3, 3)}, kink=True,
         values={"x": [[[[1] * 3] * 3]]}, torch=lambda t, x: t.nn.functional.max_pool2d(x, 2, 1)),
    Case("GlobalAveragePool", "y=GlobalAveragePool(x)", {"x": (2, 3, 4, 2)}, linear=True),
    Case("GlobalMaxPool", "y=GlobalMaxPool(x)", {"x": (2, 3, 4, 2)}, torch=lambda t, x: x.amax((2, 3), True)),
)  # fmt: skip
CASES = (*CONV, *TRANSPOSED, *POOLS)

TestRules = judged(CASES)
