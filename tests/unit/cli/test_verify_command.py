"""`verify` and `locate` on the command line: exact output, where it goes, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from amp_rewrite.cli import program
from amp_rewrite.runtime.runner import CPU, cuda_opens
from support.paths import ROOT

HEAD = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (float[3] y)'
MODELS = {
    "full.onnx": HEAD + " <float a = {300}, float b = {0.00390625}> { [up] p = Mul (x, a) [down] y = Mul (p, b) }",
    # 300 and 1/256 as float16's bits
    "half.onnx": HEAD + " <float16 a = {23728}, float16 b = {7168}>"
    " { h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Mul (p, b) y = Cast <to = 1> (q) }",
    "wide.onnx": HEAD.replace("float[3] y", "float[3] y, float[3] z") + " { y = Relu (x) z = Neg (x) }",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with three models and two batches."""
    monkeypatch.chdir(tmp_path)
    for name, text in MODELS.items():
        onnx.save(onnx.parser.parse_model(text), name)
    np.savez("small.npz", x=np.float32([1, 2, 3]))
    np.savez("large.npz", x=np.float32([1, 300, 1000]))


def run(*words: str) -> Result:
    return CliRunner().invoke(program, words)


def outcome(*words: str) -> tuple[int, str, str]:
    result = run(*words)
    return result.exit_code, result.stdout, result.stderr


emulated = pytest.mark.skipif(cuda_opens(), reason="half runs as it is where CUDA opens")

OK = f"""\
half.onnx against full.onnx
  reference  full.onnx: float32 on {CPU}
  candidate  half.onnx: float16 emulated on {CPU}
  data       small.npz: 1 batch
  passes if  |a - b| <= 0 + 0.001 |a| in every element

  output  batch  max abs  scaled  score  at   reference  candidate
  y           0        0       0      0  [0]  1.1719     1.1719

ok: 3 values compared in 1 output and 1 batch
"""
LOST = "2 of 3 values are NaN or infinite where the reference is finite"
FAILED = f"""\
half.onnx against full.onnx
  reference  full.onnx: float32 on {CPU}
  candidate  half.onnx: float16 emulated on {CPU}
  data       large.npz: 1 batch
  passes if  |a - b| <= 0 + 0.001 |a| in every element

  output  batch  max abs  scaled  score  at   reference  candidate
  y           0        0       0      -  [1]  351.56     inf        {LOST}

failed: output 'y', batch 0: {LOST}
note: `amp-rewrite locate` names the op that the error comes from
"""


@emulated
def test_verify_prints_the_verdict_and_exits_with_0_or_1() -> None:
    assert outcome("verify", "full.onnx", "half.onnx", "--data", "small.npz", "--set", "rtol=1e-3") == (0, OK, "")
    assert outcome("verify", "full.onnx", "half.onnx", "--data", "large.npz", "--set", "rtol=1e-3") == (1, FAILED, "")


@emulated
def test_verify_can_be_quiet_and_can_print_json() -> None:
    words = ("verify", "full.onnx", "half.onnx", "--data", "large.npz", "--set", "rtol=1e-3")
    assert outcome(*words, "-q") == (1, "", "")
    code, stdout, stderr = outcome(*words, "-q", "--json")
    found = json.loads(stdout)
    assert (code, stderr, found["ok"], found["data"]) == (
        1,
        "",
        False,
        {"origin": "large.npz", "random": False, "batches": 1},
    )


def test_verify_compares_the_outputs_asked_for() -> None:
    words = ("verify", "wide.onnx", "wide.onnx", "--data", "small.npz", "--set", "rtol=0")
    assert outcome(*words)[1].endswith("ok: 6 values compared in 2 outputs and 1 batch\n")
    assert outcome(*words, "--only", "y")[1].endswith(
        "ok: 3 values compared in 1 output and 1 batch\nnote: not compared: output 'z'\n"
    )


NOTHING_FED = "no input data; add --data FILE, or --random"


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "verify full.onnx half.onnx --data small.npz": (
            "no criterion for the outputs; add --tolerance X, or --metric NAME=X;"
            " start with a tolerance of 1e-2 for float16, 8e-2 for bfloat16;"
            " see 'amp-rewrite verify --help'"
        ),
        "verify full.onnx half.onnx --set rtol=1": f"{NOTHING_FED}; see 'amp-rewrite verify --help'",
        "verify full.onnx half.onnx --data small.npz --metric snr": (
            "--metric snr has no finite number as its bound; write --metric snr=40, say"
        ),
        "verify full.onnx half.onnx --data small.npz --set rtol=1 --only z": "full.onnx has no output 'z'; it has 'y'",
        "verify full.onnx gone.onnx --data small.npz --set rtol=1": "cannot read gone.onnx: No such file or directory",
        "locate full.onnx half.onnx": f"{NOTHING_FED}; see 'amp-rewrite locate --help'",
        "locate full.onnx wide.onnx --data small.npz --top 0": (
            "Invalid value for '--top': 0 is not in the range x>=1; see 'amp-rewrite locate --help'"
        ),
        "locate full.onnx wide.onnx --data small.npz": (
            "no value of the two models matches: their ops have neither names nor structure in common"
        ),
    }.items(),
)
def test_mistakes_are_told_in_one_line(words: str, message: str) -> None:
    assert outcome(*words.split()) == (2, "", f"error: {message}\n")


LOCATED = """\
half.onnx against full.onnx
  reference  full.onnx
  candidate  half.onnx: float16 emulated
  data       large.npz: 1 batch
  matched    2 of 2 values (100 %)

the error first jumps at
  op  type  runs as  adds  off by  max abs  largest value
  up  Mul   float16   inf     inf      inf          3e+05  overflows

ops that add most
  op    type  runs as  adds  off by  max abs  largest value
  up    Mul   float16   inf     inf      inf          3e+05  overflows
  down  Mul   float16   inf     inf      inf       1.17e+03  overflows
"""


def test_locate_prints_where_the_error_jumps_and_what_adds_most() -> None:
    words = ("locate", "full.onnx", "half.onnx", "--data", "large.npz")
    assert outcome(*words) == (0, LOCATED, "")
    code, stdout, stderr = outcome(*words, "--top", "1", "--json")
    found = json.loads(stdout)
    assert (code, stderr, found["schema"], [row["op"] for row in found["rows"]]) == (0, "", 1, ["up"])
    assert outcome(*words, "-q") == (0, "", "")


# -- the form of the JSON ------------------------------------------------------------------------------

DOCS = ROOT / "docs" / "reference"
PRINTED = {
    "verify": (
        ("full.onnx", "half.onnx", "--data", "small.npz", "--set", "rtol=1e-3"),
        ("full.onnx", "half.onnx", "--data", "large.npz", "--set", "rtol=1e-3", "--emulate"),
        ("full.onnx", "wide.onnx", "--random", "--metric", "cosine=0.9"),
        ("wide.onnx", "wide.onnx", "--random", "--metric", "snr=9"),
    ),
    "locate": (
        ("full.onnx", "half.onnx", "--data", "small.npz"),
        ("full.onnx", "half.onnx", "--data", "large.npz", "--top", "1"),
        ("half.onnx", "half.onnx", "--random"),
        ("full.onnx", "full.onnx", "--random"),
    ),
}


@pytest.mark.parametrize(("command", "words"), [(name, words) for name, each in PRINTED.items() for words in each])
def test_what_is_printed_as_json_is_as_its_schema_says(command: str, words: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((DOCS / f"{command}.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)

    jsonschema.Draft202012Validator(schema).validate(json.loads(run(command, *words, "--json").stdout))


@pytest.mark.parametrize("command", PRINTED)
def test_a_schema_refuses_what_lacks_a_field_has_another_or_one_of_another_type(command: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads((DOCS / f"{command}.schema.json").read_text("utf-8")))
    printed = json.loads(run(command, *PRINTED[command][1], "--json").stdout)

    def refused(**changed: object) -> bool:
        return not validator.is_valid({k: v for k, v in {**printed, **changed}.items() if v is not ...})

    assert validator.is_valid(printed)
    assert all(refused(**{name: ...}) for name in printed)
    assert refused(more=1) and refused(schema=2)
    for name in printed["rows"][0]:
        assert refused(rows=[{k: v for k, v in printed["rows"][0].items() if k != name}]), name
        assert refused(rows=[{**printed["rows"][0], name: {}}]), name
