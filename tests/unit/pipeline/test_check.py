"""The check of a conversion on a random batch: its findings, repairs and limits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite import Model, View, convert, verify
from amp_rewrite.errors import FeedError, PatternError
from amp_rewrite.pipeline import smoke_check
from amp_rewrite.settings.choices import KEEP_KEY
from amp_rewrite.settings.selectors import exactly, select
from support.hard_models import HARD
from unit.cli.test_cli import folder, run

__all__ = ["folder"]

SHOWN = ("llama_outlier", "t5_outlier", "large_logits", "vae_decoder")
"""Hard models with faults that a random batch shows."""
RIGHT = (*SHOWN, "masked_rows", "far_rotary")


def parsed(body: str, into: str = "float[4, 8] x", out: str = "float[4, 8] y") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g ({into}) => ({out}) {{ {body} }}')


PRODUCT = "w = Constant <value = float[8, 8] {" + ", ".join(["0.5"] * 64) + "}> () h = MatMul (x, w) "


def loud() -> onnx.ModelProto:
    """Values up to some 10⁶ between low products."""
    return parsed(f"{PRODUCT} c = Constant <value = float {{1e6}}> () k = Mul (h, c) m = MatMul (k, w) y = Sub (m, k)")


def keep_lines(model: Model) -> list[str]:
    entries = {entry.key: entry.value for entry in model.proto.metadata_props}
    return entries.get(KEEP_KEY, "").splitlines()


@pytest.mark.parametrize("name", RIGHT)
def test_a_checked_conversion_is_right_on_real_data_and_reproducible_without_a_check(name: str) -> None:
    hard = HARD[name]()
    checked = convert(hard.model, check=True)
    evidence = checked.report.evidence
    assert (evidence.level == "repaired", evidence.random, evidence.emulated) == (name in SHOWN, True, True)
    assert bool(evidence.keep) == (name in SHOWN)
    assert keep_lines(checked.result) == list(evidence.keep)
    assert verify(hard.model, checked, hard.batch, tolerance=1e-2)
    again = convert(hard.model, keep=list(evidence.keep))
    assert bool(checked.result.recorded("tf32")) == (name == "vae_decoder")  # convolutions beside the kept op
    if name == "vae_decoder":
        again.model.metadata_props[0].value += " tf32=1"
    assert again.model.SerializeToString() == checked.model.SerializeToString()
    rules, repeated = ({row.rule for row in one.report.rows} for one in (checked, again))
    assert ("check" in rules, "keep" in rules) == ("keep" in repeated, "check" in repeated) == (name in SHOWN, False)
    totals = checked.report.totals
    assert totals.compute_lowered >= 0.9 * totals.compute_ops


def test_faults_that_no_random_batch_shows_remain_and_the_report_says_so() -> None:
    hard = HARD["offset_norm"]()
    checked = convert(hard.model, check=True)
    assert "no gross error" in str(checked.report.evidence) and "says nothing" in str(checked.report.evidence)
    assert not verify(hard.model, checked, hard.batch, tolerance=1e-2)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (parsed(f"{PRODUCT} n = Neg (h) a = Abs (n) m = Sub (n, a) s = Log (m) y = Mul (s, h)"), "'y' of the float32"),
        (parsed(f"{PRODUCT} r = RandomNormalLike (h) y = Add (h, r)"), "draws different random numbers"),
        (parsed(PRODUCT + "y = ArgMax (h)", out="int64[1, 8] y"), "no floating-point output"),
        (parsed(PRODUCT + "y = Relu (h)", "float[9999999, 8] x", "float[9999999, 8] y"), "is too large"),
        (parsed(PRODUCT + "s = Constant <value = float {1e6}> () b = Mul (h, s) y = Sin (b)"), "float32 model itself"),
    ],
    ids=["nan", "random", "integers", "large", "unstable"],
)
def test_a_skipped_check_has_a_reason_and_gives_the_plain_conversion(model: onnx.ModelProto, why: str) -> None:
    checked = convert(model, check=True, safety="none")
    evidence = checked.report.evidence
    assert evidence.level == "none" and why in evidence.objection and why in str(evidence)
    assert checked.model == convert(model, safety="none").model


BLIND = "a graph does not show what overflows on your inputs"


@pytest.mark.parametrize("cause", [PRODUCT, "h = Relu (x)"], ids=["lowered", "copied"])
def test_a_source_that_onnxruntime_cannot_open_is_named(folder: Path, cause: str) -> None:
    model = parsed(f"{cause} y = vendor.Magic (h)")
    model.opset_import.add(domain="vendor", version=1)
    onnx.save(model, "odd.onnx")
    done = run("odd.onnx")
    unknown = "Fatal error: vendor:Magic(-1) is not a registered function/op"
    message = f"not checked on data: {BLIND}; the check stopped: onnxruntime cannot open the model: {unknown}; give"
    assert done.exit_code == 0 and message in done.stdout
    assert "\nnext: " not in done.stdout and "\nyour inputs: " not in done.stdout  # no data can check it
    assert "give the model a local function of that name" in " ".join(done.stdout.split())


def test_many_weights_are_not_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_check, "MAX_WEIGHTS", 100)
    assert "above 1 GB" in convert(loud(), check=True).report.evidence.objection


def test_a_requested_batch_size_must_fit() -> None:
    with pytest.raises(FeedError, match=r"the shape \[3, 8\] does not fit"):
        convert(loud(), check={"shapes": {"x": (3, 8)}})


def test_free_dimensions_are_small_and_the_report_names_them() -> None:
    converted = convert(
        parsed(PRODUCT + "y = Relu (h)", into="float[batch, odd, 8] x", out="float[batch, odd, 8] y"), check=True
    )
    assert converted.report.evidence.data == "random, seed 0, deviation 2, batch = 1, odd = 16"


def test_a_conversion_with_data_is_not_checked() -> None:
    data = {"x": np.ones((4, 8), np.float32)}
    assert convert(loud(), data=data, check=True).report.evidence.level == "guarded"


def test_a_failure_caused_by_the_users_lower_option_writes_nothing(folder: Path) -> None:
    onnx.save(loud(), "loud.onnx")
    options: dict[str, Any] = {"lower": ["op=Mul"], "safety": "none"}
    assert convert("loud.onnx", check=True, **options).report.evidence.level == "failed"
    done = run("loud.onnx", "-o", "low.onnx", "--lower", "op=Mul", "--set", "safety=none")
    assert (done.exit_code, Path("low.onnx").exists()) == (1, False)
    assert "failed: output 'y'" in done.stdout and "not written: low.onnx" in done.stderr
    batch = run("loud.onnx", "-o", "out/", "--lower", "op=Mul", "--set", "safety=none")
    assert batch.exit_code == 1 and "not written: output 'y'" in batch.stderr
    assert run("loud.onnx", "-o", "low.onnx", "--lower", "op=Mul", "--set", "safety=none", "--no-check").exit_code == 0


def test_the_command_checks_and_its_lines_give_the_same_file(folder: Path) -> None:
    onnx.save(HARD["large_logits"]().model, "net.onnx")
    assert run("net.onnx", "-o", "checked.onnx", "-q").exit_code == 0
    lines = keep_lines(Model.load("checked.onnx"))
    assert lines
    keep = [word for line in lines for word in ("--keep", line)]
    assert run("net.onnx", "-o", "again.onnx", "--no-check", *keep).exit_code == 0
    assert Path("again.onnx").read_bytes() == Path("checked.onnx").read_bytes()
    assert run("net.onnx", "-o", "many/").exit_code == 0
    assert Path("many/net.onnx").read_bytes() == Path("checked.onnx").read_bytes()
    Path("amp.toml").write_text("check = false\n")
    assert run("net.onnx", "-o", "plain.onnx").exit_code == 0
    assert Path("plain.onnx").read_bytes() != Path("checked.onnx").read_bytes()


def test_a_pattern_may_name_a_fused_op() -> None:
    model = HARD["llama_outlier"]().model
    kind = "com.microsoft::SkipSimplifiedLayerNormalization"
    converted = convert(model, keep=[f"op={kind}"])
    rows = [row for row in converted.report.rows if row.op == kind]
    assert rows and all(row.dtype == "float32" for row in rows)
    with pytest.raises(PatternError, match="no op matches op=LayerNorm"):
        convert(model, keep=[f"op={kind}", "op=LayerNormalization"])


@pytest.mark.parametrize("name", ["a[0]/b*", "a,b c", "(x, y", "tab\tline\n", ""])
def test_the_pattern_of_an_op_matches_only_that_op(name: str) -> None:
    model = parsed(PRODUCT + "m = MatMul (h, w) y = MatMul (m, w)")
    model.graph.node[2].name = name
    view = View.of(Model.load(model))
    assert select(view, exactly(view.ops[2])) == (2,)
