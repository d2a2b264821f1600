"""Mistakes on the command line: each is answered in one line with a remedy and changes no file."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from support.repositories import repository, tree
from unit.cli.test_cli import TEXT

HEAD = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => '
MODELS = {
    "net.onnx": TEXT,
    "neg.onnx": HEAD + "(float[3] y) { y = Neg (x) }",
    "wide.onnx": HEAD + "(float[3] y, float[3] z) { y = Relu (x) z = Neg (x) }",
    "sum.onnx": HEAD.replace("x)", "x, float[3] h)") + "(float[3] hn) { hn = Add (h, x) }",
    "lookup.onnx": HEAD.replace("float[3] x", "int64[2] ids") + "(float[2] y) <float[3] t = {1, 2, 3}>"
    " { y = Gather (t, ids) }",
}
SEVERAL = "convert writes one model to a file; several go to a folder, as in -o FOLDER/"
DASH = "- is not a file: models cannot be read from or written to a pipe; name a file; see HELP"
NEEDS = "needs input data; add --data FILE (and --tolerance X to repair); see HELP"
OWN = "this setting has its own option"
NO_DATA = "no input data; add --data FILE, or --random; see HELP"
ONE_REPORT = "for several models, --report writes a line for each to a .jsonl file; name one; see HELP"
SUFFIX = "the suffix determines the format; name a .json or .html file"
THREADS = "is not a valid number of threads; use 1 or more, or omit it for one per core"
EMPTY_RANGE = "the int range 9,3 of input 'ids' is empty or does not fit int64"
LOOKUP = "--random --set int-range=ids=9,3"
SUMS = "sum.onnx sum.onnx --random --tolerance 0"

MISTAKES = {
    # the first argument
    "net.onx": "no such file: net.onx; see 'amp-rewrite --help'",
    "./nett.onnx": "no such file: ./nett.onnx; see 'amp-rewrite --help'",
    "no/such/folder.onnx": "no such file: no/such/folder.onnx; see 'amp-rewrite --help'",
    "converrt": "no command or file 'converrt'; did you mean 'convert'? See 'amp-rewrite --help'",
    "zzzzzz": "no command or file 'zzzzzz'; name a model or a command; see 'amp-rewrite --help'",
    # missing and unknown arguments
    "diff net.onnx": "Missing argument 'B', as in `amp-rewrite diff model.onnx model.float16.onnx`",
    "report": "Missing argument 'MODEL', as in `amp-rewrite report model.onnx --expect 'compute >= 95%'`",
    "emulate": "Missing argument 'MODEL', as in `amp-rewrite emulate model.float16.onnx`",
    "calibrate": "Missing argument 'MODEL', as in `amp-rewrite calibrate model.onnx --data batches.npz`",
    "bench --data d.npz": (
        "Missing argument 'A [B]...', as in `amp-rewrite bench model.onnx model.float16.onnx --random`"
    ),
    "completion": "Missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish, as in `…",
    "completion bsh": "Invalid value for 'bash|zsh|fish': 'bsh' is not one of 'bash', 'zsh', 'fish'; see HELP",
    "train-step net.onnx": (
        "Missing option '--loss', as in `amp-rewrite train-step model.onnx --loss 'cross_entropy(logits,labels)'`"
    ),
    "explain mask_fil": "no file, rule or op type 'mask_fil'; did you mean 'mask_fill'? See HELP",
    "explain net.onnx w1": "net.onnx: 'w1' is a weight; explain an op that reads it",
    "explain net.onnx atc": "net.onnx: no op or value is named 'atc'; did you mean 'act'?",
    "convert net.onnx --outptu x": "no such option --outptu; did you mean --output? See HELP",
    "convert net.onnx --dry_run x": "no such option --dry_run; did you mean --dry-run? See HELP",
    "convert net.onnx --saftey x": "no such option --saftey; did you mean --set safety=…? See HELP",
    "convert net.onnx --precision x": "no such option --precision; did you mean --to? See HELP",
    "convert net.onnx --allow_nonfinite x": (
        "no such option --allow_nonfinite; did you mean --set allow-nonfinite=…? See HELP"
    ),
    "net.onnx --fp16": "no such option --fp16; did you mean --to float16? See HELP",
    "emulate net.onnx --rounding": "no such option --rounding; did you mean --no-rounding? See HELP",
    "net.onnx --data -o": "--data needs a value, but -o is an option; see HELP",
    # values
    "net.onnx --to float8": "--to: unknown type or policy 'float8'; did you mean 'float16'?",
    "net.onnx --keep op=Matmul": (
        "pattern 'op=Matmul' matches nothing: no op matches op=Matmul; did you mean 'MatMul'?"
    ),
    "net.onnx --io z=float16": "io 'z=float16': no float32 input or output is named 'z'; the names are x, y",
    "emulate net.onnx --io low": "Invalid value for '--io': 'low' is not one of 'numpy', 'same', 'float32'; see HELP",
    "net.onnx --target tensort": "--target: unknown value 'tensort' for target; did you mean 'tensorrt'?",
    "net.onnx --fuse contribs": "--fuse: unknown value 'contribs' for fuse; did you mean 'contrib'?",
    "diff net.onnx net.onnx --format jsn": "Invalid value for '--format': 'jsn' is not one of 'text', 'json', …",
    "diff net.onnx net.onnx --fail-on loweredd": "unknown kind of difference 'loweredd'; did you mean 'lowered'?",
    "net.onnx --tolerance 1%": "--tolerance 1% must be a number, not str",
    "calibrate net.onnx --data d.npz --to float32": "--to: cannot lower to float32; use float16 or bfloat16",
    "calibrate net.onnx --data d.npz --threads 0": f"0 {THREADS}",
    "calibrate net.onnx --random --threads -1": f"-1 {THREADS}",
    "locate neg.onnx wide.onnx --data three.npz --top 0": (
        "Invalid value for '--top': 0 is not in the range x>=1; see HELP"
    ),
    "train-step net.onnx --loss cross_entropy(y) --optimizer adamax": (
        "unknown optimizer 'adamax'; use one of sgd, rmsprop, adam, adamw, adagrad"
    ),
    "train-step net.onnx --loss cross_entropy(y) --policy float17": (
        "unknown policy 'float17'; did you mean 'mixed_float16'?"
    ),
    f"verify lookup.onnx lookup.onnx {LOOKUP} --set rtol=0": EMPTY_RANGE,
    f"locate lookup.onnx lookup.onnx {LOOKUP}": EMPTY_RANGE,
    f"bench lookup.onnx {LOOKUP}": EMPTY_RANGE,
    # settings
    "net.onnx --set level=max": (
        "--set level: unknown value 'max' for level; use one of default, tensor-cores-only, treat-gray-as-deny,"
        " unsafe-force-all, lower-all; see HELP"
    ),
    "net.onnx --set saftey=none": "--set: unknown key 'saftey'; did you mean 'safety'? See HELP",
    "net.onnx --set safety": "--set takes KEY=VALUE, but 'safety' has no value; write --set safety=…; see HELP",
    "net.onnx --set to=bfloat16": f"--set to: {OWN}; write --to bfloat16; see HELP",
    "net.onnx --set overwrite=true": f"--set overwrite: {OWN}; write --overwrite; see HELP",
    "net.onnx --set safety=off": ("--set safety: unknown value 'off' for safety; use one of default, none; see HELP"),
    "net.onnx --set headroom=much": "--set headroom: headroom='much' must be a number, not str; see HELP",
    "net.onnx --set steps=1.5": "--set steps: steps='1.5' must be a whole number, not str; see HELP",
    "net.onnx --set external-data=1": (
        "--set external-data: external_data='1' must be True or False, not str; see HELP"
    ),
    "emulate net.onnx --set safety=none": (
        "--set safety: emulate does not read this setting; it reads external-data; see HELP"
    ),
    "net.onnx --data d.npz --set headroom=1": (
        "--set headroom: a headroom of 1 is not a finite number above 1; use a number such as 2; see HELP"
    ),
    "net.onnx --data d.npz --set rtol=-1": "--set rtol=-1.0: use a finite number, 0 or more",
    "net.onnx --data d.npz --set rtol=1 --set budget=0": "a budget of 0 trials finds nothing; use 1 or more",
    # conflicting options and missing ones
    "net.onnx --set rtol=0.1": f"--set rtol {NEEDS}",
    "net.onnx --metric cosine=0.9": f"--metric {NEEDS}",
    "net.onnx --set budget=3 --data d.npz": f"--set budget {NEEDS}",
    "net.onnx --set headroom=3": f"--set headroom {NEEDS}",
    "net.onnx --set feedback=hn=h --set steps=300": f"--set feedback {NEEDS}",
    "net.onnx --ranges r.json --data d.npz": (
        "--ranges and --data both give ranges; leave one out, or add --tolerance X to repair; see HELP"
    ),
    "net.onnx --shape x=1,2 --data d.npz": (
        "--shape describes random input; leave out either --shape or the data; see HELP"
    ),
    "calibrate net.onnx": NO_DATA,
    "verify neg.onnx wide.onnx --set rtol=1": NO_DATA,
    "locate neg.onnx wide.onnx": NO_DATA,
    "bench neg.onnx": NO_DATA,
    "verify neg.onnx neg.onnx --data three.npz": (
        "no criterion for the outputs; add --tolerance X, or --metric NAME=X; start with a tolerance of 1e-2 for"
        " float16, 8e-2 for bfloat16; see HELP"
    ),
    "verify neg.onnx neg.onnx --data three.npz --metric snr": (
        "--metric snr needs a finite bound, as in --metric snr=40"
    ),
    "verify neg.onnx neg.onnx --data three.npz --set rtol=1 --only z": "neg.onnx has no output 'z'; it has 'y'",
    f"verify {SUMS} --steps 2": "--steps 2 needs --feedback OUT=IN and at least 1 step",
    f"verify {SUMS} --feedback hn=h": (
        "random, seed 0, one sequence, hn fed back to h: one batch is one run, so nothing is fed back; give several"
        " batches, or --steps 100 to run the batch 100 times"
    ),
    f"verify {SUMS} --feedback hn=x1 --steps 2": "--feedback hn=x1: the model has no input 'x1'; did you mean 'x'?",
    # inputs
    "report none.onnx": "cannot read none.onnx: No such file or directory",
    "calibrate none.onnx --data d.npz": "cannot read none.onnx: No such file or directory",
    "emulate none.onnx": "cannot read none.onnx: No such file or directory",
    "train-step none.onnx --loss y": "cannot read none.onnx: No such file or directory",
    "verify neg.onnx none.onnx --data three.npz --set rtol=1": "cannot read none.onnx: No such file or directory",
    "diff net.onnx none.json": "cannot read none.json: No such file or directory; name a model or a JSON report",
    "emulate empty.onnx": "empty.onnx is empty; export or download it again",
    "net.onnx --lists none.yaml": ("none.yaml: no such list file; the shipped lists are float16, bfloat16, tensorflow"),
    "net.onnx --config none.toml": "cannot read none.toml: No such file or directory; pass the path of a TOML file",
    "net.onnx --ranges none.json": (
        "cannot read none.json: No such file or directory; name a file written by calibrate"
    ),
    "net.onnx --data none.npz": (
        "cannot read none.npz: there is no such file; name a .npz file, or a folder of .npz files"
    ),
    "locate neg.onnx net.onnx --data three.npz": (
        "no values of the two models match: their ops have neither names nor structure in common"
    ),
    "net.onnx --data named.npz": "batch 0 has an array 'X1', but the model has the input 'x'; drop it",
    "-": DASH,
    "report -": DASH,
    "convert ''": "the file name is empty; name a file; see HELP",
    "net.onnx ''": "the file name is empty; name a file; see HELP",
    # outputs
    "net.onnx -o ''": "the file name is empty; name a file; see HELP",
    "net.onnx -o -": DASH,
    "emulate net.onnx -o -": DASH,
    "net.onnx fp16": "'fp16' is not the name of an .onnx file; to write there, use -o fp16; see HELP",
    "net.onnx a.onnx b.onnx": f"{SEVERAL}; see HELP",
    "net.onnx a.onnx -o b.onnx": f"{SEVERAL}; see HELP",
    "net.onnx wide.onnx": "'wide.onnx' exists, and could be an input; to write there, use -o wide.onnx; see HELP",
    "net.onnx wide.onnx --overwrite": (
        "'wide.onnx' exists, and could be an input; to write there, use -o wide.onnx; see HELP"
    ),
    "net.onnx -o net.onnx/out.onnx": "cannot create the folder net.onnx: File exists; name another output",
    "emulate net.onnx -o net.onnx/out.onnx": "cannot create the folder net.onnx: File exists; name another output",
    "emulate net.onnx -o net.onnx": "net.onnx already exists; name another output, or use --overwrite",
    "calibrate net.onnx --data none.npz -o d.npz": ("d.npz already exists; name another output, or use --overwrite"),
    "convert net.onnx --report old.html": ("old.html already exists; name another report, or use --overwrite"),
    "report net.onnx -o old.html": "old.html already exists; name another report, or use --overwrite",
    "report net.onnx -o net.onnx": f"cannot write a report to net.onnx: {SUFFIX}",
    "net.json -o out.json --report net.onnx": f"cannot write a report to net.onnx: {SUFFIX}",
    "net.json -o out.json --report net.json": (
        "cannot write a report to net.json: it would replace an input file; name another file"
    ),
    "net.json -o out.json --report out.json": (
        "cannot write a report to out.json: it would replace an input file; name another file"
    ),
    # several models
    "src": "several models go to a folder; add -o FOLDER; see HELP",
    "src -o out --report r.json": ONE_REPORT,
    "src -o out --report r.html": ONE_REPORT,
    "src -o out -j two": "two is not a number of jobs; use 1 or more, or the HOST:PORT…",
    "src -o out -j 0": "0 is not a number of jobs…",
    "src/model.onnx -o m.onnx -j 2": "--jobs is for several models; name a folder, and add -o FOLDER…",
    "src/model.onnx --resume": "--resume is for several models…",
    "src -o src": "src/decoder/model.onnx would be written over src/decoder/model.onnx, itself…",
    "src src/gone.onnx -o out": "cannot read src/gone.onnx: No such file or directory",
    "nothing/*.onnx -o out": "no file matches 'nothing/*.onnx'…",
}
"""Command lines with their stderr after `error: `; … stands for more text, HELP for the help command."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models, batches, a page and a repository."""
    root = tmp_path_factory.mktemp("mistakes")
    for name, text in MODELS.items():
        onnx.save(onnx.parser.parse_model(text), root / name)
    (root / "net.json").write_bytes((root / "net.onnx").read_bytes())
    (root / "empty.onnx").touch()
    (root / "old.html").write_text("old")
    np.savez(root / "d.npz", x=np.ones((2, 8), np.float32))
    np.savez(root / "named.npz", x=np.ones((2, 8), np.float32), X1=np.ones(2), x1=np.ones(2))
    np.savez(root / "three.npz", x=np.ones(3, np.float32))
    repository(root / "src")
    return root


@pytest.mark.parametrize(("words", "error"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_a_remedy_and_changes_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, error: str
) -> None:
    monkeypatch.chdir(folder)
    before = tree(folder)
    done = CliRunner().invoke(program, [word.strip("'") for word in words.split()])
    first = words.partition(" ")[0]
    command = first if first in COMMANDS else "convert"
    error = f"error: {error}".replace("HELP", f"'amp-rewrite {command} --help'")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(error.rstrip("…")) if error.endswith("…") else done.stderr == f"{error}\n"
    assert done.stderr.count("\n") == 1
    assert tree(folder) == before


# -- keywords in Python ----------------------------------------------------------------------------------


def test_an_unknown_keyword_suggests_the_nearest_or_lists_all() -> None:
    with pytest.raises(
        TypeError, match=r"^convert\(\) got an unexpected keyword argument 'kep'; did you mean 'keep'\?$"
    ):
        amp_rewrite.convert("net.onnx", kep="op=Softmax")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^doctor\(\) got an unexpected keyword argument 'tp'; it accepts model, to$"):
        amp_rewrite.doctor("net.onnx", tp="float16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'tolerance'; it accepts model, to, lists, "):
        amp_rewrite.convert("net.onnx", tolerance=0.1)  # type: ignore[call-arg]
