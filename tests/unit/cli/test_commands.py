"""Commands other than `convert`: exact output, its destination, and exit codes."""

import json
import os
import re
from html import unescape
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from amp_rewrite import EvidenceError, Ranges
from amp_rewrite.runtime.runner import CPU, cuda_works
from support.objections import run as run_model
from support.paths import ROOT
from unit.cli.test_cli import TEXT, run
from unit.cli.test_cli import folder as empty

__all__ = ["empty"]

HEAD = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (float[3] y)'
LOWS = "(float16[2] x, bfloat16[2] b) => (float16[2] y, bfloat16[2] c)"
MODELS = {
    "net.onnx": TEXT,
    "full.onnx": HEAD + " <float a = {300}, float b = {0.00390625}> { [up] p = Mul (x, a) [down] y = Mul (p, b) }",
    # 300 and 1/256 as float16's bits
    "half.onnx": HEAD + " <float16 a = {23728}, float16 b = {7168}>"
    " { h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Mul (p, b) y = Cast <to = 1> (q) }",
    "wide.onnx": HEAD.replace("float[3] y", "float[3] y, float[3] z") + " { y = Relu (x) z = Neg (x) }",
    "lows.onnx": HEAD.partition("(")[0] + LOWS + " { y = Mul (x, x)  c = Mul (b, b) }",
    "nan.onnx": HEAD + " <float[3] none = {0, 1, 1}> { d = Mul (x, none) y = Div (d, none) }",
    "lookup.onnx": HEAD.replace("float[3] x) => (float[3]", "int64[64] ids) => (float[64]")
    + " <float[3] table = {1, 20, 300}> { y = Gather (table, ids) }",
}


@pytest.fixture(autouse=True)
def folder(empty: Path) -> Path:
    """Enter a folder with models and batches, without settings in the environment."""
    for name, text in MODELS.items():
        onnx.save(onnx.parser.parse_model(text), name)
    np.savez("net.npz", x=np.float32([[1, 2, 3, 4, 5, 6, 7, 8], [-5, 0, 7, 8, 1, 1, 1, 1]]))
    np.savez("more.npz", x=np.ones((2, 8), np.float32), label=np.array(["cat", "dog"], dtype=object))
    np.savez("small.npz", x=np.float32([1, 2, 3]))
    np.savez("large.npz", x=np.float32([1, 300, 1000]))
    return empty


def outcome(*words: str) -> tuple[int, str, str]:
    done = run(*words)
    return done.exit_code, done.stdout, done.stderr


# -- verify and locate --------------------------------------------------------------------------------

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
note: `amp-rewrite locate` finds the op that causes the error
"""


def test_nan_on_both_sides_and_the_outputs_to_compare_are_options() -> None:
    words = ("verify", "wide.onnx", "wide.onnx", "--data", "small.npz", "--set", "rtol=0")
    assert outcome(*words)[1].endswith("ok: 6 values compared in 2 outputs and 1 batch\n")
    assert outcome(*words, "--only", "y")[1].endswith(
        "ok: 3 values compared in 1 output and 1 batch\nnote: not compared: output 'z'\n"
    )
    words = ("verify", "nan.onnx", "nan.onnx", "--random", "--set", "rtol=0", "--only", "y")
    assert [run(*words).exit_code, run(*words, "--equal-nan").exit_code] == [1, 0]
    assert "note: NaN on both sides counts as equal" in run(*words, "--equal-nan").output


LOCATED = """\
half.onnx against full.onnx
  reference  full.onnx
  candidate  half.onnx: float16 emulated
  data       large.npz: 1 batch
  matched    2 of 2 values (100%)

the error first jumps at
  op  type  runs as  adds  off by  max abs  largest value
  up  Mul   float16   inf     inf      inf          3e+05  overflows

ops that add the most error
  op    type  runs as  adds  off by  max abs  largest value
  up    Mul   float16   inf     inf      inf          3e+05  overflows
  down  Mul   float16   inf     inf      inf       1.17e+03  overflows
"""


PAIR = "full.onnx half.onnx --data"
EMULATED = {
    f"verify {PAIR} small.npz --set rtol=1e-3": (0, OK, ""),
    f"verify {PAIR} large.npz --set rtol=1e-3": (1, FAILED, ""),
    f"verify {PAIR} large.npz --set rtol=1e-3 -q": (1, "", ""),
    f"locate {PAIR} large.npz": (0, LOCATED, ""),
    f"locate {PAIR} large.npz -q": (0, "", ""),
}


@pytest.mark.skipif(cuda_works(), reason="half runs unchanged where CUDA loads")
@pytest.mark.parametrize(("words", "expected"), EMULATED.items(), ids=EMULATED)
def test_verify_and_locate_print_this(words: str, expected: tuple[int, str, str]) -> None:
    assert outcome(*words.split()) == expected


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
def test_printed_json_matches_its_schema(command: str, words: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((DOCS / f"{command}.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    printed = json.loads(run(command, *words, "--json").stdout)
    jsonschema.Draft202012Validator(schema).validate(printed)
    assert "--top" not in words or [row["op"] for row in printed["rows"]] == ["up"]


@pytest.mark.parametrize("command", PRINTED)
def test_a_schema_refuses_missing_extra_and_mistyped_fields(command: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads((DOCS / f"{command}.schema.json").read_text("utf-8")))
    printed = json.loads(run(command, *PRINTED[command][1], "--json").stdout)

    def is_refused(**changed: object) -> bool:
        return not validator.is_valid({k: v for k, v in {**printed, **changed}.items() if v is not ...})

    assert validator.is_valid(printed)
    assert all(is_refused(**{name: ...}) for name in printed)
    assert is_refused(more=1) and is_refused(schema=2)
    for name in printed["rows"][0]:
        assert is_refused(rows=[{k: v for k, v in printed["rows"][0].items() if k != name}]), name
        assert is_refused(rows=[{**printed["rows"][0], name: {}}]), name


# -- emulate -------------------------------------------------------------------------------------------


def types(path: str) -> list[str]:
    graph = onnx.load(path).graph
    return [onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)]


def ops(path: str) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_the_twin_is_written_beside_the_model() -> None:
    assert outcome("emulate", "lows.onnx") == (0, "", "wrote lows.emulated.onnx\n")
    assert types("lows.emulated.onnx") == ["FLOAT16", "FLOAT", "FLOAT16", "FLOAT"]
    assert ops("lows.emulated.onnx") == [*["Cast"] * 3, "Mul", "Cast", "Cast", "Mul", *["Cast"] * 3]
    y, c = run_model(onnx.load("lows.emulated.onnx"), {"x": np.float16([300, 2]), "b": np.float32([1.01, 3])})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(c, np.float32([1.015625, 9]))  # 1.01 is 1.0078125 in bfloat16, its square 1.015625


@pytest.mark.parametrize(
    ("io", "expected"), [("same", ["FLOAT16", "BFLOAT16"] * 2), ("float32", ["FLOAT", "FLOAT", "FLOAT", "FLOAT"])]
)
def test_inputs_and_outputs_of_a_twin_have_the_requested_types(io: str, expected: list[str]) -> None:
    assert outcome("emulate", "lows.onnx", "-o", "twin.onnx", "--io", io) == (0, "", "wrote twin.onnx\n")
    assert types("twin.onnx") == expected


def test_a_model_without_low_types_is_written_unchanged_with_a_message() -> None:
    message = "nothing to emulate: net.onnx has neither float16 nor bfloat16\nwrote net.emulated.onnx\n"
    assert outcome("emulate", "net.onnx") == (0, "", message)
    assert Path("net.emulated.onnx").read_bytes() == Path("net.onnx").read_bytes()


def test_weights_are_written_where_requested() -> None:
    square = "float16[128, 128]"
    header = '<ir_version: 10, opset_import: ["" : 21]>'
    model = onnx.parser.parse_model(f"{header} net ({square} x) => ({square} y) {{ y = Mul (x, w) }}")
    weight = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, "heavy.onnx")
    assert outcome("emulate", "heavy.onnx") == (0, "", "wrote heavy.emulated.onnx\n")
    apart = outcome("emulate", "heavy.onnx", "-o", "apart.onnx", "--set", "external-data=true")
    assert apart == (0, "", "wrote apart.onnx\n")
    assert len(list(Path().glob("*.data"))) == 1
    for path in ("heavy.emulated.onnx", "apart.onnx"):
        (tensor,) = onnx.load(path).graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weight.astype(np.float32))


# -- calibrate -----------------------------------------------------------------------------------------

SHOWN = """\
net.onnx: ranges for float16
  data       net.npz, 1 batch
  values     7 seen, 0 not seen, 0 not measured
  overflow   0 values beyond 65504
  nonfinite  0 values with infinity or NaN

  value  absmax  headroom  smallest  overflow  subnormal  flushed  nonfinite  elements
  y        8103      8.08     33.12         -          -        -          -        12
  h          18  3.64e+03         7         -          -        -          -         8
  a          18  3.64e+03         7         -          -        -          -         8
  z           9  7.28e+03       3.5         -          -        -          -        12
  x           8  8.19e+03         1         -          -        -          -        16
  w1        0.5  1.31e+05       0.5         -          -        -          -        32
  w2      0.125  5.24e+05     0.125         -          -        -          -        24
"""


def test_ranges_are_saved_beside_the_model_by_default_and_printed_as_a_table() -> None:
    assert outcome("calibrate", "net.onnx", "--data", "net.npz", "-o", "r.json") == (0, SHOWN, "wrote r.json\n")
    Path("sub").mkdir()
    Path("net.onnx").rename("sub/net.onnx")
    words = ("calibrate", "sub/net.onnx", "--data", "net.npz")
    assert outcome(*words) == (0, SHOWN, "wrote sub/net.ranges.json\n")
    exists = "error: sub/net.ranges.json already exists; name another output, or use --overwrite\n"
    assert outcome(*words) == (2, "", exists)
    assert run(*words, "--overwrite").exit_code == 0


def test_a_report_in_place_of_ranges_is_recognized() -> None:
    assert run("net.onnx", "--dry-run", "--report", "r.json").exit_code == 0
    with pytest.raises(EvidenceError) as error:
        Ranges.load("r.json")
    assert "is a conversion report, not a ranges file" in str(error.value)
    assert str(error.value).startswith("r.json") and "calibrate" in str(error.value)


REMARK = "ignored, because no input has this name: 'label'\n"


@pytest.mark.parametrize(
    "words",
    [
        "convert net.onnx --dry-run",
        "calibrate net.onnx -o r.json",
        "explain net.onnx first",
        "bench net.onnx --rounds 1 --no-memory",
    ],
)
def test_labels_in_the_data_are_reported_once_on_stderr(words: str) -> None:
    done = run(*words.split(), "--data", "more.npz")
    assert (done.exit_code, done.stderr.count(REMARK), "label" in done.stdout) == (0, 1, False), done.output


def largest(file: str) -> float:
    """Return the largest magnitude of the lookup's output."""
    return float(json.loads(Path(file).read_text("utf-8"))["values"]["y"]["absmax"])


def test_random_integers_are_drawn_from_the_stated_range() -> None:
    """Of 64 draws, one of two values is missing for one in 2⁶³ seeds, and the seed is fixed."""
    assert run("calibrate", "lookup.onnx", "--random", "--set", "int-range=ids=0,2", "-o", "two.json").exit_code == 0
    assert run("calibrate", "lookup.onnx", "--random", "--set", "int-range=ids=0,3", "-o", "three.json").exit_code == 0
    assert (largest("two.json"), largest("three.json")) == (20, 300)


# -- bench ---------------------------------------------------------------------------------------------

QUICK = ("--provider", CPU, "--rounds", "2", "--no-memory")


def test_two_models_are_timed_side_by_side() -> None:
    code, out, err = outcome("bench", "full.onnx", "full.onnx", "--data", "small.npz", *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == ["full.onnx, full.onnx (2)", f"  runs on   {CPU}"]
    assert "  data      small.npz: x [3]" in lines
    assert any(line.startswith("  measured  2 rounds of ") for line in lines)
    assert [line.split()[:4] for line in lines if line.startswith("  latency")] == [["latency,", "ms", "median", "p5"]]


def test_the_json_of_a_benchmark_is_all_of_stdout() -> None:
    code, out, err = outcome("bench", "full.onnx", "--random", "--json", *QUICK)
    result = json.loads(out)
    assert (code, err, result["provider"], result["rounds"], result["fed"]) == (0, "", CPU, 2, "random, seed 0: x [3]")
    assert [entry["memory"] for entry in result["entries"]] == [None]


# -- pages ---------------------------------------------------------------------------------------------

PAGES = {
    f"verify {PAIR} large.npz --tolerance 1e-2": (1, {"outputs"}),
    f"locate {PAIR} large.npz": (0, {"text"}),
    "diff full.onnx half.onnx": (1, {"graph", "changes"}),
    "calibrate full.onnx --data large.npz -o r.json --overwrite": (0, {"ranges"}),
}


@pytest.mark.parametrize(("words", "expected"), PAGES.items(), ids=PAGES)
def test_a_command_writes_its_page_and_prints_the_same(words: str, expected: tuple[int, set[str]]) -> None:
    code, stdout, _ = outcome(*words.split())
    also, same, stderr = outcome(*words.split(), "--report", "deep/page.html")
    assert (code, also, same) == (expected[0], expected[0], stdout)
    assert stderr.splitlines()[-1].endswith("wrote deep/page.html".replace("/", os.sep))
    html = Path("deep/page.html").read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert set(re.findall(r'<section id="(\w+)"', html)) == expected[1]


def text_of(page: str) -> str:
    html = Path(page).read_text("utf-8")
    assert html.startswith("<!doctype html>")
    return unescape(re.sub("<[^>]*>", "", html.partition("<main")[2].partition("</main>")[0]))


def test_a_page_suggests_the_same_next_command_as_the_terminal() -> None:
    Path("in").mkdir()
    Path("net.onnx").rename("in/net.onnx")
    done = run("in/net.onnx", "-o", "low.onnx", "--report", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\nwrote low.onnx\n")
    command = done.stdout.rpartition("next: ")[2].rstrip("\n")
    assert command.startswith("amp-rewrite in/net.onnx -o low.onnx --report net.html --data ")
    assert f"next: {command}" in text_of("net.html")


def test_an_inventory_and_a_report_in_a_file_are_drawn() -> None:
    done = run("report", "net.onnx", "-o", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\n")
    assert "Inventory of net.onnx." in text_of("net.html")

    run("net.onnx", "-q", "--dry-run", "--report", "report.json")
    assert run("report", "report.json", "-o", "report.html").exit_code == 0
    assert "in float16." in text_of("report.html")
