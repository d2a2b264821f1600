"""The page of the GPU suite: what was measured by now, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.shared import measure

Rows = Sequence[Mapping[str, Any]]

GUIDE = "TensorFlow's guide of 2020 states 12 → 4 µs for a sample (3×) on a Titan V, in training."


def page(about: Mapping[str, Any], rows: Rows) -> list[str]:
    """The lines of the page: the machine, then a table of each kind, then what is missing."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = [
        "# Measured on " + about["device"],
        "",
        f"{about['date']}, driver {about['driver']}, CUDA {about['cuda']}, {about['provider']}, {about['cpu']},"
        f" {about['cores']} cores, {about['system']}, Python {about['python']}, {versions}.",
    ]
    if about["tiny"]:
        head += ["", "**Small models, one round: this shows that everything runs, and no time means anything.**"]
    if about["provider"].startswith("CPU"):
        head += ["", "CPU: half precision is slower here, and onnxruntime computes most of it in float32."]
    parts = [_latencies(rows), _slower(rows), _training(rows), _fitted(rows), _emulated(rows), _missing(rows)]
    return [*head, *(line for part in parts if part for line in ("", *part))]


def _done(rows: Rows, kind: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for job in rows:
        row = job["row"]
        if job["kind"] == kind and row is not None and "fault" not in row:
            yield job, row


def _latencies(rows: Rows) -> list[str]:
    order = list(dict.fromkeys(job["model"] for job in rows if job["kind"] == "latency"))
    done = sorted(_done(rows, "latency"), key=lambda pair: order.index(pair[0]["model"]))  # ways in the order they ran
    table = [_latency(job["model"], job["way"], row) for job, row in done]
    head = ("model", "batch", "way", "low", "ms", "µs a sample", "vs float32", "vs TF32", "with copies, ms")
    more = ("float32, ms", "TF32, ms", "memory", "error L2", "error max", "not finite")
    notes = [
        "`low`: MatMul, Gemm and Conv ops that read a half type. `memory`: peak, of float32's. Speed-ups with their",
        "95 % interval, from rounds in which all take turns; latencies without copies between host and device.",
    ]
    return ["## Inference", "", *notes, "", *measure.markdown((*head, *more), table)] if table else []


def _latency(model: str, way: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    entries = row["bench"]["entries"]
    float32, half = entries[0], entries[-1]
    tf32 = entries[1] if len(entries) > 2 else None
    seconds, memory = half["latency"]["median"], (half["memory"], float32["memory"])
    share = f"{100 * memory[0] / memory[1]:.0f} %" if all(memory) else "–"
    return (
        *(model, str(row["batch"]), way, "{} of {}".format(*row["low"]), _ms(seconds)),
        f"{1e6 * seconds / row['batch']:.3g}",
        *(_factor(half["speed_ups"].get(entry["name"])) if entry else "–" for entry in (float32, tf32)),
        _ms(half["copies"]["median"]),
        *(_ms(entry["latency"]["median"]) if entry else "–" for entry in (float32, tf32)),
        share,
        *(_error(row["error"][kind]) for kind in ("l2", "largest")),
        str(row["error"]["nonfinite"]),
    )


def _slower(rows: Rows) -> list[str]:
    """The three ops of each model that got slower most under the first way, if any did."""
    table = []
    for job, row in _done(rows, "latency"):
        for changed in row["bench"]["changed"]:
            for op in changed["ops"][:3]:
                before, after = op["before"], op["after"]
                if after is not None and _seconds(after) > _seconds(before):
                    numbers = ("–" if before is None else _us(before), _us(after))
                    table.append((job["model"], f"`{after['name']}`", after["op"], *numbers, after["provider"]))
    head = ("model", "op", "type", "before, µs", "after, µs", "ran on")
    return ["## Ops that got slower in amp-rewrite's float16", "", *measure.markdown(head, table)] if table else []


def _training(rows: Rows) -> list[str]:
    table = []
    for job, row in _done(rows, "training"):
        for entry in row["bench"]["entries"]:
            sample = f"{1e6 * entry['latency']['median'] / row['batch']:.3g}"
            factors = [_factor(found) for found in entry["speed_ups"].values()]
            memory = "–" if entry["memory"] is None else f"{entry['memory'] / 1e6:.0f}"
            table.append((job["policy"], entry["name"], str(row["batch"]), sample, ", ".join(factors), memory))
    head = ("policy", "step in", "batch", "µs a sample", "vs float32, and vs TF32", "peak MB")
    return ["## A training step of the dense network", "", GUIDE, "", *measure.markdown(head, table)] if table else []


def _fitted(rows: Rows) -> list[str]:
    table = []
    for job, row in _done(rows, "fit"):
        for entry in row["bench"]["entries"]:
            rates = [f"{s['items']}: {s['throughput']:.4g}" for s in entry["sweep"] if s["throughput"]]
            found = entry["largest"]
            table.append((job["model"], entry["name"], f"{found['limit'] / 1e6:.0f}", found["items"], ", ".join(rates)))
    head = ("model", "in", "memory, MB", "largest batch", "items/s by batch")
    return ["## The largest batch", "", *measure.markdown(head, table)] if table else []


def _emulated(rows: Rows) -> list[str]:
    """Worst ratio first: where the emulation errs least like the device."""
    found = sorted(_done(rows, "emulation"), key=lambda pair: -_off(pair[1]["ratio"]))
    table = [
        (
            *(job["model"], job["to"], "–" if row["ratio"] is None else f"{row['ratio']:.2f}"),
            *(_error(row[side]["l2"]) for side in ("on_device", "emulated", "apart")),
            f"{row['on_device']['nonfinite']} / {row['emulated']['nonfinite']}",
        )
        for job, row in found
    ]
    head = ("model", "type", "ratio", "error on device", "error emulated", "device against emulation", "not finite")
    text = "Errors against float32 without TF32 (L2). A ratio of 1: the emulation errs as the device does."
    return ["## Emulation against the device", "", text, "", *measure.markdown(head, table)] if table else []


def _off(ratio: float | None) -> float:
    return 0.0 if not ratio else max(ratio, 1 / ratio)


def _missing(rows: Rows) -> list[str]:
    lines = [f"- {job['name']}: {job['row']['fault']}" for job in rows if job["row"] and "fault" in job["row"]]
    late = [job["name"] for job in rows if job["row"] is None]
    lines += [f"- not yet measured: {', '.join(late)}"] if late else []
    return ["## What is missing", "", *lines] if lines else []


def _seconds(op: Mapping[str, Any] | None) -> float:
    return 0.0 if op is None else float(op["seconds"])


def _us(op: Mapping[str, Any]) -> str:
    return f"{1e6 * op['seconds']:.1f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _factor(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    interval = "" if found["low"] is None else f" ({found['low']:.2f}–{found['high']:.2f})"
    return f"{found['factor']:.2f}×{interval}"
