"""Operations of an op, counted from shapes; expected counts are written out next to their shapes."""

import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.ir.view import View
from amp_rewrite.reports.work import _COUNTS, flops
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.request import Request


def counted(node: str, *inputs: str) -> float:
    """Count the operations of one op with the result `y` and inputs of these shapes; "*" for an unknown shape.

    A type other than float precedes its shape.
    """
    named = []
    for at, (kind, _, shape) in enumerate(text.rpartition(" ") for text in inputs):
        named.append(f"{kind or 'float'}{f'[{shape}]' if shape != '*' else ''} i{at}")
    domain = ', "com.microsoft" : 1' if "com.microsoft" in node else ""
    text = f'<ir_version: 10, opset_import: ["" : 23{domain}]> g ({", ".join(named)}) => (float y) {{ {node} }}'
    model = onnx.parser.parse_model(text)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    view = View.of(amp_rewrite.Model.load(model))
    return flops(view, view.ops[0])


# B batches, S queries, P past keys, L keys, H heads of D numbers.
B, S, P, L, H, D = 2, 3, 4, 5, 6, 8
SELF = 4 * B * H * D * S * S  # S queries and S keys: 2 operations per product, for scores and for sums of values
SELF_PAST = 4 * B * H * D * S * (S + P)
CROSS = 4 * B * H * D * S * L
NBITS = "com.microsoft.MatMulNBits <K = 5, N = 7, block_size = 16>"
MHA = f"com.microsoft.MultiHeadAttention <num_heads = {H}>"
GQA = f"com.microsoft.GroupQueryAttention <num_heads = {H}, kv_num_heads = 2>"


@pytest.mark.parametrize(
    ("node", "inputs", "count"),
    [
        ("y = MatMul (i0, i1)", ["2,3,5", "5,7"], 2 * 2 * 3 * 5 * 7),
        ("y = Gemm (i0, i1)", ["3,5", "5,7"], 2 * 3 * 5 * 7),
        ('y = Einsum <equation = "b i k, b k j -> b i j"> (i0, i1)', ["2,3,5", "2,5,7"], 2 * 2 * 3 * 5 * 7),
        ('y = Einsum <equation = "...ik,...kj->...ij"> (i0, i1)', ["2,3,5", "2,5,7"], 2 * 2 * 3 * 5 * 7),
        ("y = Conv (i0, i1)", ["1,4,8,8", "6,4,3,3"], 2 * 6 * 6 * 6 * 4 * 3 * 3),
        ("y = ConvTranspose (i0, i1)", ["1,4,8,8", "4,6,3,3"], 2 * 4 * 8 * 8 * 6 * 3 * 3),
        ("y = Attention (i0, i1, i1)", [f"{B},{H},{S},{D}", f"{B},{H},{L},{D}"], CROSS),
        ("y, k, v = Attention (i0, i0, i0, , i1, i1)", [f"{B},{H},{S},{D}", f"{B},{H},{P},{D}"], SELF_PAST),
        ("y = com.microsoft.FusedMatMul (i0, i1)", ["2,3,5", "2,5,7"], 2 * 2 * 3 * 5 * 7),
        ("y = com.microsoft.FusedMatMul <transA = 1, transB = 1> (i0, i1)", ["2,5,3", "2,7,5"], 2 * 2 * 3 * 5 * 7),
        ("y = com.microsoft.FusedGemm <transB = 1> (i0, i1)", ["3,5", "7,5"], 2 * 3 * 5 * 7),
        ("y = com.microsoft.GemmFastGelu (i0, i1)", ["2,3,5", "5,7"], 2 * 2 * 3 * 5 * 7),
        (f"y = {NBITS} (i0, i1, i2)", ["2,3,5", "uint8 7,1,16", "7,1"], 2 * 2 * 3 * 5 * 7),
        (f"y = {MHA} (i0, i1, i1)", [f"{B},{S},{H * D}", f"{B},{L},{H * D}"], CROSS),
        (f"y = {MHA} (i0)", [f"{B},{S},{H},3,{D}"], SELF),
        (f"y, k, v = {MHA} (i0, i0, i0, , , , i1, i1)", [f"{B},{S},{H * D}", f"{B},{H},{P},{D}"], SELF_PAST),
        (
            f"y, k, v = {GQA} (i0, i1, i1, i2, i2, i3, i4)",
            [f"{B},{S},{H * D}", f"{B},{S},{2 * D}", f"{B},2,{P},{D}", f"int32 {B}", "int32 1"],
            SELF_PAST,
        ),
        (f"y = {GQA} (i0, , , , , i1, i2)", [f"{B},{S},{(H + 2 * 2) * D}", f"int32 {B}", "int32 1"], SELF),
        ("y = Relu (i0)", ["2,3"], 0),
    ],
)
def test_an_op_counts_two_operations_per_product_in_its_sums(node: str, inputs: list[str], count: int) -> None:
    assert counted(node, *inputs) == count


def test_every_counted_op_is_on_the_allow_list() -> None:
    """A misspelled name in the table would silently count nothing."""
    allowed = {entry.name for entry in Request.of().op_lists if entry.color is Color.ALLOW}
    assert set(_COUNTS) <= allowed
