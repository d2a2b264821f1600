"""Write docs/evidence/webgpu.md from measured numbers."""

from collections.abc import Iterator, Sequence
from statistics import median
from textwrap import fill
from typing import Any

from suites.webgpu.measure import FACTOR, LEAST
from suites.webgpu.worker import BOUND

Numbers = dict[str, Any]


def page(numbers: Numbers) -> str:
    """Format the whole page, deterministically."""
    return "\n\n".join(_sections(numbers)) + "\n"


def times(row: dict[str, Any]) -> float:
    """Return the error on the device as a multiple of the emulated one; 1 if both are exact."""
    return float(row["device"] / row["emulated"]) if row["emulated"] else 1.0


def growth(rows: Sequence[dict[str, Any]]) -> float:
    """Return the largest part of a model's error missing from the emulation, over the root of its sums' terms."""
    added = ((max(0.0, row["device"] ** 2 - row["emulated"] ** 2), row["terms"]) for row in rows if row["terms"])
    return float(max((square / terms) ** 0.5 for square, terms in added))


def _sections(numbers: Numbers) -> Iterator[str]:
    yield "# Float16 on a WebGPU device"
    yield _text(
        f"`make webgpu-page` runs float16 on {numbers['device']}, with {numbers['provider']} and onnxruntime "
        f"{numbers['onnxruntime']} on {numbers['machine']}, and writes this page and "
        "[its numbers](../../benchmarks/results/webgpu.json). The device is software, so it shows how float16 affects "
        "results, but not speed. Every WebGPU device without subgroup matrices runs the same shaders, but a "
        "driver may round functions such as `exp` differently."
    )
    yield "## Each op"
    yield _text(
        "Each error is the RMS error of the result relative to float32, for normally distributed inputs rounded to "
        "float16. *Emulated* is the error under `emulate`, which accumulates in float32, as CUDA does; *ratio* is the "
        "error on the device divided by the emulated one. The device's shaders round after each step. *Allowed* is the "
        f"largest ratio that tests accept: {FACTOR:g}, or up to √n for a product over n terms, because rounding errors "
        f"add up as in a random walk. The smallest accepted ratio is {LEAST:g}. The shapes in "
        "`tests/suites/webgpu/op_cases.py` were fixed before the first run. The median ratio is "
        f"{median(map(times, numbers['ops'])):.2f}, and the largest is {max(map(times, numbers['ops'])):.0f}."
    )
    yield _table(
        ("op and shapes", "device", "emulated", "ratio", "allowed"),
        [
            (row["case"], f"{row['device']:.1e}", f"{row['emulated']:.1e}", f"{times(row):.2f}", f"{row['factor']:.3g}")
            for row in numbers["ops"]
        ],
    )
    yield "## Each model"
    rows = [row for row in numbers["models"] if "error" not in row]
    worst = max(rows, key=lambda row: row["device"])
    yield _text(
        "Each error is the largest of any output, relative to that output's largest float32 value, for models "
        "converted with `--target webgpu`. *Low* counts float16 ops, and *terms* counts the terms per result of each "
        "of their products. The contribution of float16 sums to the error (the square root of the difference of "
        f"squares) is at most {growth(rows):.1e} times the square root of the number of terms. "
        f"No error exceeds {max(map(times, rows)):.1f} times the "
        f"emulated one (tests allow {FACTOR:g}). The largest error, for {worst['model']}, is {worst['device']:.1e} "
        f"(tests allow {BOUND:g})."
    )
    yield _table(
        ("model", "device", "emulated", "ratio", "low", "terms", "nodes on device / CPU", "float ops on the CPU"),
        [_model(row) for row in numbers["models"]],
    )
    yield _text(
        "On the CPU, the provider runs ops that compute shapes and other small integers. The last column lists the CPU "
        "ops that process floating-point values: they have no WebGPU kernel at their version, or contain other ops."
    )


def _model(row: dict[str, Any]) -> Sequence[str]:
    if "error" in row:
        return (row["model"], row["error"], "", "", "", "", "", "")
    return (
        row["model"],
        *(f"{row[key]:.1e}" for key in ("device", "emulated")),
        f"{times(row):.2f}",
        str(row["low_ops"]),
        str(row["terms"]),
        f"{row['device_nodes']} / {row['cpu_nodes']}",
        " ".join(row["cpu_floats"]) or "–",
    )


def _text(words: str) -> str:
    return fill(words, 120, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
