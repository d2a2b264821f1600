"""Regions: the ops that a repair may pin together, and the order in which it suspects them."""

from __future__ import annotations

import math

import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.repaired import Region, regions_of, suspicion
from amp_rewrite.settings.request import Request

WEIGHTS = ",".join(str(n % 9 + 1) for n in range(32))
MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,8] x, int64[2] ids) => (float[4,2] y, float[2,4] z)
<float[2,2] v = {1,2,3,4}, float[8,4] w = {WEIGHTS},
 float[3,4] table = {1,2,3,4,5,6,7,8,9,8,7,6}>
{
  [product] p = MatMul (x, w)
  [rows] r = Gather (table, ids)
  [sum] s = Add (p, r)
  [turned] t = Transpose (s)
  [head] y = MatMul (t, v)
  [last] z = Exp (p)
}""".replace("WEIGHTS", WEIGHTS)
GELU = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,8] x) => (float[2,4] y)
<float[8,4] w = {WEIGHTS}, float[4,4] v = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2},
 float root = {1.4142135}, float one = {1}, float half = {0.5}>
{
  [product] p = MatMul (x, w)
  [scaled] a = Div (p, root)  [bell] e = Erf (a)  [shifted] o = Add (e, one)
  [gated] m = Mul (p, o)  [halved] g = Mul (m, half)
  [second] y = MatMul (g, v)
}""".replace("WEIGHTS", WEIGHTS)


def regions(text: str, errors: dict[str, float] | None = None, **options: object) -> dict[str, Region]:
    draft = Draft.of(Model(onnx.parser.parse_model(text)), Request.of(**options))  # type: ignore[arg-type]
    return {region.name: region for region in regions_of(draft, draft.paint(), errors or {})}


def test_a_region_is_a_low_op_that_rounds_or_reads_weights() -> None:
    """A Transpose of low values makes none; a Gather is exact, but its table is stored low; Exp is float32."""
    assert list(regions(MODEL)) == ["product", "rows", "sum", "head"]


def test_casts_constants_and_ops_with_bodies_are_no_regions() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[2,2] h, bool c) => (float16[2,2] y) {
      [wide] w = Cast <to = 1> (h)  [narrow] n = Cast <to = 10> (w)  [fixed] k = Constant <value = float16[1] {2}> ()
      [noise] r = RandomNormal <dtype = 10, shape = [2,2]> ()
      [product] p = MatMul (n, r)  [scaled] s = Mul (p, k)
      [branch] y = If (c) <then_branch = t () => (float16[2,2] a) { [inner] a = Exp (s) },
                           else_branch = e () => (float16[2,2] b) { [copy] b = Identity (s) }>
    }"""
    found = regions(text)
    assert {"noise", "product", "scaled"} <= found.keys()
    assert not found.keys() & {"wide", "narrow", "fixed", "branch", "copy"}


def test_a_cluster_is_one_region_under_the_name_of_its_largest_error() -> None:
    found = regions(GELU, {"scaled": 0.25, "gated": 0.5, "product": 0.125}, fuse="none")
    assert list(found) == ["product", "gated", "second"]
    assert (found["gated"].kind, len(found["gated"].ops), found["gated"].error) == ("gelu_erf", 5, 0.5)
    assert found["product"].error == 0.125
    assert found["second"].error == 0.0


def test_pins_of_a_region_hold_all_its_ops_and_say_why() -> None:
    region = regions(GELU, {"bell": 0.5}, fuse="none")["bell"]
    assert [pin.op for pin in region.pins] == list(region.ops)
    assert {(pin.rule, pin.raises, pin.note) for pin in region.pins} == {
        ("repair", True, "bell (gelu_erf) alone adds a relative error of 0.5")
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Region("a", "Add", (), math.inf, True), Region("b", "Add", (), 1e9, False)),
        (Region("a", "Add", (), 0.5, True), Region("b", "Add", (), 0.2, False)),
        (Region("a", "Add", (), 0.51, False), Region("b", "MatMul", (), 0.99, True)),
        (Region("a", "Add", (), 0.99, False), Region("b", "Add", (), 0.51, False)),
        (Region("a", "Add", (), 0.01, False), Region("b", "Add", (), 0.0, False)),
    ],
    ids=["infinity", "power of two", "cheaper at the same power", "larger at the same power", "none at all"],
)
def test_the_region_that_is_suspected_more_comes_first(first: Region, second: Region) -> None:
    assert sorted([second, first], key=suspicion) == [first, second]
