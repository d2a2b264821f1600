"""The command line: exact output, its destination, and exit codes."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.request import KEYWORDS, Request

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[2,8] x) => (float[2,6] y)
<float[8,4] w1 = {WEIGHT}, float[4,6] w2 = {OTHER}> {
  [first] h = MatMul (x, w1)
  [act] a = Relu (h)
  [second] z = MatMul (a, w2)
  [squash] y = Exp (z)
}
"""
TEXT = MODEL.replace("{WEIGHT}", "{" + ",".join(["0.5"] * 32) + "}").replace(
    "{OTHER}", "{" + ",".join(["0.125"] * 24) + "}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an empty folder, without settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AMP_REWRITE_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def model(folder: Path) -> str:
    onnx.save(onnx.parser.parse_model(TEXT), folder / "net.onnx")
    return "net.onnx"


def run(*words: str) -> Result:
    return CliRunner().invoke(program, words)


def files(folder: str = ".") -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


def shell(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "amp_rewrite", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


@pytest.mark.parametrize("words", [["--help"], ["train-step", "--help"], ["diff", "a.json", "a.json"]], ids=" ".join)
def test_commands_that_read_no_model_import_nothing_slow(model: str, words: list[str]) -> None:
    Path("a.json").write_text(run("report", model, "--json").stdout)
    program = (
        "import sys\n"
        "from amp_rewrite.cli import program\n"
        "try:\n"
        f"    program.main({words})\n"
        "finally:\n"
        "    slow = {'onnx', 'numpy', 'networkx', 'rich', 'yaml', 'onnxruntime', 'google'} & set(sys.modules)\n"
        "    print(sorted(slow), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_no_argument_shows_the_help_and_the_version_is_one_line() -> None:
    done = run()

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: amp-rewrite [OPTIONS] COMMAND [ARGS]...\n")
    assert run("--version").output == "amp-rewrite 0.1.0\n"


# -- the first word -----------------------------------------------------------------------------------------


def test_a_model_as_first_argument_is_converted_even_if_named_like_a_command(model: str, folder: Path) -> None:
    done = run(model)

    assert (done.exit_code, done.stderr) == (0, "wrote net.float16.onnx\n")
    assert [node.op_type for node in onnx.load("net.float16.onnx").graph.node].count("Cast") == 2
    onnx.save(onnx.parser.parse_model(TEXT), folder / "diff")

    assert run("diff").stderr == "error: Missing argument 'A', as in `amp-rewrite diff model.onnx model.float16.onnx`\n"
    assert run("./diff").stderr == "wrote diff.float16.onnx\n"


# -- convert ------------------------------------------------------------------------------------------------


def test_the_output_is_named_after_the_type_and_replaced_only_on_request(model: str) -> None:
    assert run(model, "-q").output == ""
    first = Path("net.float16.onnx").read_bytes()

    done = run(model)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: net.float16.onnx already exists; name another output, or use --overwrite\n"

    assert run(model, "--overwrite", "-q").exit_code == 0
    assert Path("net.float16.onnx").read_bytes() == first


@pytest.mark.parametrize("settings", ["", "overwrite = true\n"], ids=["by itself", "with a file that says so"])
def test_the_input_is_replaced_only_on_request(model: str, settings: str) -> None:
    before = Path(model).read_bytes()
    Path("amp.toml").write_text(settings)
    Path("sub").mkdir()
    Path("sub/link.onnx").symlink_to(Path(model).resolve())
    error = (
        "error: {} is the input: overwriting it discards the float32 precision of its weights; name another"
        " output, or add --overwrite to this command\n"
    )

    for words, file in (((model, "-o", model), model), (("sub/link.onnx", "-o", f"sub/../{model}"), f"sub/../{model}")):
        done = run(*words)
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", error.format(file))
    assert Path(model).read_bytes() == before

    Path("amp.toml").write_text("overwrite = true\n")
    assert run(model, "-o", "sub/link.onnx").exit_code == 0  # only the link is removed
    assert Path(model).read_bytes() == before
    assert run(model, "-o", model, "--overwrite").exit_code == 0
    assert Path(model).read_bytes() == Path("sub/link.onnx").read_bytes() != before


@pytest.mark.parametrize("command", ["convert", "emulate"])
def test_the_data_of_the_input_is_never_replaced(model: str, command: str) -> None:
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(proto, model, save_as_external_data=True, location="shared.bin", size_threshold=0)
    before = Path("shared.bin").read_bytes()

    done = run(command, model, "-o", "shared.bin", "--overwrite")

    error = f"cannot write shared.bin: it contains the weights of {model}, which is being read; name another output"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {error}\n")
    assert Path("shared.bin").read_bytes() == before


def test_the_report_is_the_same_json_in_a_file_and_on_stdout(model: str) -> None:
    done = run(model, "--json", "--report", "report.json")

    assert (done.exit_code, done.stderr) == (0, "wrote report.json\nwrote net.float16.onnx\n")
    assert done.stdout == Path("report.json").read_text()
    assert json.loads(done.stdout)["model"]["to"] == "float16"


def test_a_model_with_nothing_to_lower_is_written_unchanged_with_a_message(folder: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> sums (float[2] x) => (float[2] y) { y = Exp (x) }'
    onnx.save(onnx.parser.parse_model(text), folder / "sums.onnx")

    done = run("sums.onnx", "-q")
    assert (done.exit_code, done.stderr) == (0, "")
    assert Path("sums.float16.onnx").read_bytes() == Path("sums.onnx").read_bytes()

    assert run("sums.onnx", "--dry-run").stderr == "nothing to lower: sums.onnx is unchanged\n"


def test_json_on_stdout_leaves_one_warning_per_kind_on_stderr(folder: Path) -> None:
    onnx.save(onnx.parser.parse_model(TEXT.replace("0.5", "1e6").replace("0.125", "-1e6")), folder / "big.onnx")
    words = ["big.onnx", "--dry-run", "--json", "--set", "safety=none"]

    done = run(*words)

    assert [finding["subject"] for finding in json.loads(done.stdout)["findings"]] == ["w1", "w2"]
    assert done.stderr.startswith("warning: saturated: w1: ")
    assert " (and 1 more of this kind) · " in done.stderr
    assert (done.stderr.count("\n"), run(*words, "-q").stderr) == (1, "")


OPTIONS = {
    "--to bfloat16": {"to": DType.BFLOAT16},
    "--lists tensorflow --lists a.yaml": {"lists": ("tensorflow", "a.yaml")},
    "--target onnx": {"target": Target.ONNX},
    "--keep op=A --keep b": {"keep": ("op=A", "b")},
    "--io low --io out:y=float32": {"io": ("low", "out:y=float32")},
    "--set level=lower-all --set safety=none": {"level": "lower-all", "safety": "none"},
    "--set gray-follows-allow=false": {"gray_follows_allow": False},
    "--opset 20 --set shift=6": {"opset": 20, "shift": 6},
}


@pytest.mark.parametrize("command", ["convert net.onnx", "explain net.onnx node"])
def test_options_reach_the_conversion(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def spy(model: object, **options: object) -> None:
        seen.update(options)
        raise ModelError("seen")

    monkeypatch.setattr(import_module("amp_rewrite.pipeline.convert"), "convert", spy)
    usual = {name: getattr(Request(), name) for name in KEYWORDS}
    usual |= {"data": None, "ranges": None, "headroom": 2.0, "check": False, "progress": None}

    run(*command.split(), "--no-check")
    assert seen == usual
    run(*command.split(), "--no-check", *(word for words in OPTIONS for word in words.split()))
    changed = {name: value for part in OPTIONS.values() for name, value in part.items()}
    assert seen == usual | changed


def test_an_option_overrides_the_config_file_and_the_environment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("amp.toml").write_text('keep = ["first", "second"]\n')

    def lowered(*words: str) -> int:
        totals = json.loads(run(model, "--dry-run", "--json", *words).stdout)["totals"]
        return int(totals["compute_lowered"])

    assert lowered() == 0
    assert lowered("--keep", "squash") == 2
    monkeypatch.setenv("AMP_REWRITE_LISTS", "own.yaml")
    Path("own.yaml").write_text("deny: [MatMul]\n")
    assert lowered("--keep", "squash") == 0


def test_an_internal_failure_shows_its_traceback_and_exits_with_3(model: str) -> None:
    program = (
        "import sys\n"
        "import amp_rewrite.pipeline.conversion\n"
        "def broken(*given):\n"
        "    raise KeyError('broken')\n"
        "sys.modules['amp_rewrite.pipeline.conversion'].plan_casts = broken\n"
        "from amp_rewrite.cli import program\n"
        f"program.main(['{model}'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, files()) == (2, "", [model])
    assert done.stderr.startswith("Traceback ")
    assert done.stderr.endswith(
        "KeyError: 'broken'\nerror: internal error in amp-rewrite; please report the lines above\n"
    )


def test_an_option_a_setting_and_a_keyword_agree(model: str) -> None:
    by_word = run(model, "--dry-run", "--json", "--set", "safety=none", "--set", "allow_nonfinite=TRUE").stdout
    Path("own.toml").write_text('safety = "none"\nallow-nonfinite = true\n')
    by_file = run(model, "--dry-run", "--json", "--config", "own.toml").stdout
    report = amp_rewrite.convert(model, safety="none").report
    assert json.loads(by_word)["rows"] == json.loads(by_file)["rows"] == json.loads(report.to_json())["rows"]
    assert json.loads(by_word)["model"]["safety"] == "none"


# -- exact output -------------------------------------------------------------------------------------------

CONVERTED = """\
net.onnx → float16
  work     100% of FLOPs in float16: 2 of 2 compute ops
  weights  224 B → 112 B
  target   ort-cuda

1 op stays float32
  1  on the deny list (1 Exp)

2 Casts added
  1  to float16: the model's inputs
  1  to float32: before ops in float32 (1 Exp)

not checked on data: a graph does not show what overflows on your inputs
your inputs: np.savez("batches.npz", x=…)
next: """
AGAIN = "amp-rewrite convert net.onnx --lists own.yaml --no-check "
DATA = "--data batches.npz --tolerance 1e-2"
STOCK = """\
net.onnx
  work     0% of FLOPs in float16 or bfloat16: 0 of 2 compute ops
  weights  224 B
  Casts    0

4 ops by type
  2  MatMul  2 float32
  1  Exp     1 float32
  1  Relu    1 float32
"""
EXPLAINED = """\
act (Relu) is float16: between_allow
    between lowered ops, with no denied op on the way
    on the gray list (own.yaml:3): no reason given
because second (MatMul) is float16: allow_root
    on the allow list (own.yaml:2): no reason given
"""
RAISED = """\
1 raised, casts +1 -1

raised
  second  MatMul  float16 → float32  keep

casts
  +  a  float16 → float32  read in float32 by 'second'
  -  z  float16 → float32  read in float32 by 'squash'
"""
ANNOTATED = """\
::error title=cast + a::float16 → float32 read in float32 by 'second'
::error title=cast - z::float16 → float32 read in float32 by 'squash'
::warning title=raised%3A second::second (MatMul) float16 → float32 keep
"""


@pytest.fixture
def own(model: str) -> list[str]:
    """Write a model and lists, so that the output does not depend on the shipped ones."""
    Path("own.yaml").write_text("base: empty\nallow: [MatMul]\ngray: [Relu]\ndeny: [Exp]\n")
    return [model, "--lists", "own.yaml", "--no-check"]


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (["convert", "OWN"], (0, f"{CONVERTED}{AGAIN}{DATA} --overwrite\n", "wrote net.float16.onnx\n")),
        (["convert", "OWN", "--dry-run"], (0, f"{CONVERTED}{AGAIN}--dry-run {DATA}\n", "")),
        (["report", "net.onnx"], (0, STOCK, "")),
        (["report", "a.json"], (0, CONVERTED.partition("your inputs: ")[0], "")),
        (["explain", "a.json", "act"], (0, EXPLAINED, "")),
        (["explain", "a.json", "atc"], (2, "", "error: net.onnx: no op is named 'atc'; did you mean 'act'?\n")),
        (["diff", "a.json", "a.json"], (0, "no difference\n", "")),
        (["diff", "a.json", "b.json", "-v"], (1, RAISED, "")),
        (["diff", "a.json", "b.json", "-v", "--fail-on", "lowered,added"], (0, RAISED, "")),
        (["diff", "a.json", "b.json", "--fail-on", "casts", "--format", "github"], (1, ANNOTATED, "")),
        (["explain", "OWN", "a"], (0, EXPLAINED, "")),  # the result of act
    ],
)
def test_a_command_prints_exactly_this(own: list[str], words: list[str], outcome: tuple[int, str, str]) -> None:
    Path("a.json").write_text(run(*own, "--dry-run", "--json").stdout)
    Path("b.json").write_text(run(*own, "--dry-run", "--json", "--keep", "second").stdout)

    done = run(*(word for argument in words for word in (own if argument == "OWN" else [argument])))

    text = re.sub(r"ort-cuda:[\d.]+", "ort-cuda", done.stdout)  # an older release is named
    assert (done.exit_code, text, done.stderr) == outcome


# -- report, explain, diff, lists ---------------------------------------------------------------------------


def test_diff_reads_its_fail_on_kinds_from_the_config(model: str) -> None:
    Path("a.json").write_text(run(model, "--dry-run", "--json").stdout)
    Path("b.json").write_text(run(model, "--dry-run", "--json", "--keep", "second").stdout)
    Path("amp.toml").write_text('fail-on = ["lowered"]\n')

    assert run("diff", "a.json", "b.json").exit_code == 0
    assert run("diff", "b.json", "a.json").exit_code == 1


def test_explain_states_an_ops_type_rule_and_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my.yaml").write_text("deny:\n  - {op: Conv, because: it is mine}\n")
    done = run("explain", "Conv", "my.domain::Op", "--lists", "my.yaml")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "op             color     when  source           because\n"
        "Conv           deny            my.yaml:2        it is mine\n"
        "my.domain::Op  unlisted        float16+my.yaml  is not on any list\n"
    )

    def colors(*words: str) -> list[list[str]]:
        return [line.split()[:2] for line in run("explain", *words).stdout.splitlines()[1:]]

    (folder / "own.yaml").write_text("base: empty\nunlisted: [Sin]\ngray: [Relu]\nallow: [MatMul]\ndeny: [Exp]\n")
    monkeypatch.setenv("AMP_REWRITE_LISTS", "own.yaml")
    listed = [["MatMul", "allow"], ["Relu", "gray"], ["Exp", "deny"], ["Sin", "unlisted"]]
    assert colors("lists") == listed
    assert colors("Relu", "--set", "level=treat-gray-as-deny") == [["Relu", "deny"]]


# -- the process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["explain", "lists"], ["explain", "Conv"]], ids=["long", "short"])
def test_a_closed_pipe_is_quiet(folder: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "amp_rewrite", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)
    assert process.stdout and process.stderr
    process.stdout.close()

    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


# -- the gate of continuous integration -----------------------------------------------------------------------


def test_expectations_determine_the_exit_code_and_show_the_numbers(model: str) -> None:
    done = run("report", model, "--expect", "casts <= 4", "--expect", "float16 >= 95%")
    assert done.exit_code == 1
    assert done.stdout.endswith(
        "expected\n  met     casts <= 4      0 casts\n  failed  float16 >= 95%  0% (0 of 4 float ops)\n"
    )
    assert run("report", model, "--expect", "io = float32").exit_code == 0


def test_on_a_terminal_a_diff_is_a_summary_and_names_each_op_on_demand(model: str) -> None:
    assert run(model, "-q").exit_code == 0
    program = "import sys; sys.stdout.isatty = lambda: True; from amp_rewrite.cli import program; program.main()"
    shown = {
        words: subprocess.run(
            [sys.executable, "-c", program, "diff", model, "net.float16.onnx", *words], capture_output=True, text=True
        )
        for words in ((), ("-v",))
    }
    plain = {words: re.sub("\\x1b.*?m", "", done.stdout) for words, done in shown.items()}
    assert [done.returncode for done in shown.values()] == [1, 1]
    assert "  2  MatMul  float32 → float16\n" in plain[()]
    assert "first" not in plain[()]
    assert "  first   MatMul  float32 → float16" in plain["-v",]
