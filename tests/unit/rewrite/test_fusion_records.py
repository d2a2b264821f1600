"""Records of the fusions: their models, and that every kind of fusion has one."""

from pathlib import Path

import onnx.parser
import onnxruntime
import pytest

from amp_rewrite import convert, emulate
from amp_rewrite.errors import Finding
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.rewrite import fusions
from amp_rewrite.rewrite.fusions import FUSIONS, FusionRule

named = pytest.mark.parametrize("fusion", FUSIONS, ids=[fusion.name for fusion in FUSIONS])


def findings(fusion: FusionRule, end: str) -> tuple[Finding, ...]:
    model = onnx.parser.parse_model(fusion.model(end))
    onnx.checker.check_model(model, full_check=True)
    converted = convert(model, fuse=fusion.fuse)
    on_cpu = emulate(converted.result, io="same").to_proto() if fusion.fuse == "diffusion" else converted.model
    onnxruntime.InferenceSession(on_cpu.SerializeToString(), providers=["CPUExecutionProvider"])
    return converted.report.findings


@named
def test_the_model_of_a_fusion_is_fused_and_the_nearest_one_is_not_and_both_open(fusion: FusionRule) -> None:
    told = [found.message for found in findings(fusion, "hit") if found.kind == "fused"]
    words = "computed now" if fusion.name == "constant" else f"{fusion.name.replace('_', ' ')}: one "
    assert [message.startswith(words) for message in told] == [True]
    apart = findings(fusion, "near")
    assert not any(found.message.startswith(words) for found in apart)
    assert {found.subject for found in apart if found.kind == "not_fused"} <= {each.name for each in FUSIONS}


@named
def test_a_fusion_says_what_it_replaces_and_what_keeps_it_apart(fusion: FusionRule) -> None:
    assert fusion.sections["What it replaces"].startswith(fusion.spelling)
    assert fusion.sections["What keeps it apart"].startswith(fusion.refusals)
    assert all(text.endswith(".") for text in fusion.sections.values())


def test_every_model_beside_the_fusions_belongs_to_one() -> None:
    held = {path.name for path in (Path(fusions.__file__).parent / "models").iterdir()}
    assert held == {f"{fusion.name}.{end}.onnxtxt" for fusion in FUSIONS for end in ("hit", "near")}


def test_every_operator_that_the_standard_got_later_has_a_fusion() -> None:
    assert FIRST_FUSED.keys() <= {fusion.operator for fusion in FUSIONS}
