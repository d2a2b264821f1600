"""Write the page about other converters, docs/evidence/peers.md, from results/peers.json.

    python benchmarks/run.py peers_page            # print it
    python benchmarks/run.py peers_page --write    # write docs/evidence/peers.md

A tool is compared on a model only if its result runs; otherwise the last lines say so. Its error is compared only if it
lowered every MatMul, Conv and Gemm, since products in float32 have no error.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.shared import measure

PAGE = measure.ROOT / "docs" / "evidence" / "peers.md"
OURS = "amp-rewrite"
INTRO = """# Comparison with other converters

The table compares the time, memory, Casts and error of conversions to float16, for full-size models with random
weights. Each measurement covers a whole process, from import to the written file, on {machine}.
The error (L2) is relative to the outputs of the float32 model, under emulation. [The full
table](../../benchmarks/results/peers.md) lists every tool, wall times and versions; `python benchmarks/run.py peers`
measures it.
"""

NAMES = {
    "resnet50": "ResNet-50",
    "vit_base": "ViT-base",
    "whisper_small_encoder": "Whisper encoder",
    "bert_base": "BERT-base",
    "bert_base_masked": "BERT-base, one row fully masked",
    "gpt2": "GPT-2",
    "unet": "UNet",
    "llama": "Llama",
}
TOOLS = {
    "onnxruntime_float16": "onnxruntime's `float16`",
    "onnxruntime_onnxmodel": "onnxruntime's `OnnxModel`",
    "onnxconverter_common": "onnxconverter-common",
    "modelopt_autocast": "ModelOpt AutoCast",
}
HEAD = (
    *("model", "CPU seconds, ours / fastest other", "peak MB, ours / lowest other"),
    *("Casts, ours / fewest other", "error, ours / best other with all products low"),
)
Row = Mapping[str, Any]


def page(results: Mapping[str, Any]) -> str:
    """Return the text of the page. Raise ValueError if our own result is missing."""
    about, rows = results["machine"], results["rows"]
    load = about["load"]
    machine = f"{about['cores']} cores {'shared with other work, ' if load > 2 else ''}at a load average of {load:.1f}"
    models = sorted({row["model"]: row["megabytes"] for row in rows}.items(), key=lambda named: (named[1], named[0]))
    table = measure.markdown(HEAD, [_cells([r for r in rows if r["model"] == model]) for model, _ in models])
    table[1] = "|" + "---|" * len(HEAD)
    others = "The other converters are onnxruntime's two float16 tools, onnxconverter-common and ModelOpt AutoCast."
    return "\n".join([INTRO.format(machine=machine), *table, "", others, *_failed(rows)]) + "\n"


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the row of one model: our result and the best of the others in each column."""
    ours = next((row for row in rows if row["tool"] == OURS and not row["fault"]), None)
    if ours is None:
        raise ValueError(f"amp-rewrite has no result for {rows[0]['model']}; run benchmarks/run.py peers")
    others = [row for row in rows if row["tool"] != OURS and not row["fault"]]
    whole = [row for row in others if row["judged"]["lowered"] == row["judged"]["compute"]]
    name, size = NAMES[ours["model"]], f"{ours['megabytes']:.0f} MB"
    return (
        name if "masked" in name else f"{name}, {size}",
        f"{ours['cpu']:.1f} / {_least([f['cpu'] for f in others], '.1f')}",
        f"{ours['peak'] / 1e6:.0f} / {_least([f['peak'] / 1e6 for f in others], '.0f')}",
        f"{ours['judged']['casts']} / {_least([f['judged']['casts'] for f in others], 'd')}",
        f"{_error(ours)} / {_best(whole)}",
    )


def _least(numbers: Sequence[float], spelled: str) -> str:
    return format(min(numbers), spelled) if numbers else "–"


def _error(row: Row) -> str:
    l2 = row["judged"]["l2"]
    return f"{l2:.2f}" if l2 >= 0.1 else f"{l2:.1e}".replace("e-0", "e-")


def _best(rows: Sequence[Row]) -> str:
    """Return the lowest error, and the error with the fewest Casts if it is another tool's."""
    if not rows:
        return "–"
    best = min(rows, key=lambda row: (float(_error(row)), row["judged"]["casts"]))
    least = min(rows, key=lambda row: (row["judged"]["casts"], row["judged"]["l2"]))
    if best["judged"]["casts"] == least["judged"]["casts"]:
        return _error(best)
    many, few = best["judged"]["casts"], least["judged"]["casts"]
    return f"{_error(best)} (with {many} Casts; with {few}: {_error(least)})"


def _failed(rows: Sequence[Row]) -> list[str]:
    """Return a sentence about the failed conversions as wrapped lines, if any."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["fault"]:
            found.setdefault((NAMES[row["model"]], _short(row["fault"])), []).append(TOOLS[row["tool"]])
    failures = [f"{model} by {' and '.join(tools)} ({why})" for (model, why), tools in found.items()]
    return textwrap.wrap(f"No working model: {'; '.join(failures)}.", 120, break_on_hyphens=False) if failures else []


def _short(fault: str) -> str:
    """Return the reason for a failure in a few words."""
    stopped = re.match(r"stopped (after|at) [\d.]+ \w+( of memory)?", fault)
    return stopped.group() if stopped else "onnxruntime rejects it" if "ONNXRuntimeError" in fault else "it failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/evidence/peers.md")
    args = parser.parse_args()
    text = page(json.loads((measure.RESULTS / "peers.json").read_text("utf-8")))
    if args.write:
        PAGE.write_text(text, "utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
