"""The command line of NVIDIA ModelOpt AutoCast: `python -m amp_rewrite.compat.autocast --onnx_path …`.

Options are translated into those of `amp-rewrite convert`, whose report and exit codes apply. Options without effect
are reported on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_rewrite.cli import program, terminal
from amp_rewrite.compat.float16 import op_patterns
from amp_rewrite.dtypes import DType
from amp_rewrite.settings.selectors import allow_unmatched

_TYPES = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}
_QUIET = ("WARNING", "ERROR", "CRITICAL")
_LEVELS = ("DEBUG", "INFO", *_QUIET)

_UNUSED = ("init_max", "max_depth_of_reduction", "init_conversion_max_bytes")
_UNUSED_LISTS = ("providers", "trt_plugins", "trt_plugins_precision")


def parser() -> argparse.ArgumentParser:
    """Return the parser for the options of nvidia-modelopt 0.47. Abbreviated and unknown options are errors."""
    command = argparse.ArgumentParser(
        prog="python -m amp_rewrite.compat.autocast",
        description="Convert a model with the options of ModelOpt AutoCast; `amp-rewrite convert` has more.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--onnx_path", required=True, help="the model")
    add("--output_path", help="the file to write, replaced if it exists; default: MODEL.fp16.onnx or MODEL.bf16.onnx")
    add("--low_precision_type", "-t", choices=tuple(_TYPES), default="fp16", help="--to")
    add("--calibration_data", "-d", metavar="FILE", help="--data: an .npz file, or a folder of them")
    for name, short, ours in (
        ("nodes_to_exclude", "-ne", "--keep re:X"),
        ("op_types_to_exclude", "-ope", "--keep op=X"),
        ("nodes_to_include", "-ni", "--lower re:X"),
        ("op_types_to_include", "-opi", "--lower op=X"),
    ):
        add(f"--{name}", short, nargs="*", default=[], metavar="X", help=ours)
    add("--data_max", type=float, metavar="X", help="--set headroom=65504/X for fp16, with data")
    for name in _UNUSED:
        add(f"--{name}", type=float, metavar="X", help="no effect")
    add("--keep_io_types", action="store_true", help="--io keep; without it, --io low")
    add("--log_level", choices=_LEVELS, default="INFO", help="DEBUG is --verbose, WARNING and above are --quiet")
    for name in _UNUSED_LISTS:
        add(f"--{name}", nargs="+", metavar="X", help="no effect")
    add("--opset", type=int, metavar="N", help="--opset")
    add("--use_standalone_type_inference", action="store_true", help="accepted; types never come from ONNX's inference")
    return command


def translated(args: argparse.Namespace) -> list[str]:
    """Return the arguments of `amp-rewrite` for parsed options."""
    to = _TYPES[args.low_precision_type]
    source = Path(args.onnx_path)
    out = args.output_path or source.with_name(f"{source.stem}.{args.low_precision_type}.onnx")
    io = "keep" if args.keep_io_types else "low"
    words = ["convert", "--to", to.spelling, "--io", io, "--fuse", "basic", "--overwrite"]
    for option, names, types in (
        ("--keep", args.nodes_to_exclude, args.op_types_to_exclude),
        ("--lower", args.nodes_to_include, args.op_types_to_include),
    ):
        for pattern in (*map(_anchored, names), *(p for kind in types for p in op_patterns(kind))):
            words += [option, pattern]
    if args.calibration_data is not None:
        words += ["--data", args.calibration_data]
        if args.data_max is not None:
            headroom = to.max / args.data_max if args.data_max > 0 else args.data_max
            words += ["--set", f"headroom={headroom!r}"]
    if args.opset is not None:
        words += ["--opset", str(args.opset)]
    words += ["--quiet"] if args.log_level in _QUIET else ["--verbose"] if args.log_level == "DEBUG" else []
    return [*words, "-o", str(out), "--", args.onnx_path]


def _anchored(expression: str) -> str:
    return rf"re:\A(?:{expression})"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and exit like `amp-rewrite convert`: with 0, 1 for a finding, or 2 for wrong usage."""
    args = parser().parse_args(words)
    quiet = args.log_level in _QUIET[1:]
    without_data = ("data_max",) if args.calibration_data is None else ()
    for name in (*without_data, *_UNUSED, *_UNUSED_LISTS):
        if getattr(args, name) not in (None, ["cpu"]):
            warning = f"warning: --{name} has no effect; docs/how-to/migrating.md describes the alternatives"
            terminal.talk(warning, quiet=quiet)
    with allow_unmatched() as unmatched:
        try:
            program.main(translated(args), prog_name="amp-rewrite")
        finally:
            for name in (*args.nodes_to_exclude, *args.nodes_to_include):
                if _anchored(name) in unmatched:
                    terminal.talk(f"warning: no node matches {name!r}, so it has no effect", quiet=quiet)


if __name__ == "__main__":
    main(sys.argv[1:])
