"""The page of the GPU measurement, from the rows so far, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.gpu_beside import BASES
from benchmarks.gpu.gpu_ways import BASELINES, WAYS
from benchmarks.shared import measure

Rows = Sequence[Mapping[str, Any]]
Pairs = Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]

GUIDE = "TensorFlow's guide of 2020 states 12 → 4 µs for a sample (3×) on a Titan V, in training."


def page(about: Mapping[str, Any], rows: Rows) -> list[str]:
    """Return the lines of the page: the machine, a table for each kind, and the missing rows."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = [
        "# Measured on " + about["device"],
        "",
        f"{about['date']}, driver {about['driver']}, CUDA {about['cuda']}, {about['provider']}, {about['cpu']},"
        f" {about['cores']} cores, {about['system']}, Python {about['python']}, {versions}.",
    ]
    head += ["", f"{about['packed']}."] if about.get("packed") else []
    if about["tiny"]:
        head += ["", "**Small models, one round: this shows that everything runs, but no time means anything.**"]
    if about["provider"].startswith("CPU"):
        head += ["", "CPU: half precision is slower here, and onnxruntime computes most of it in float32."]
    elif not about.get("card"):
        head += ["", "**NVIDIA's management library found no GPU: no time here means anything.**"]
    parts = [
        _beside(rows),
        _trials(rows),
        _means(rows),
        _latencies(rows),
        _ceilings(rows),
        _variants(rows),
        _kernels(rows),
        _training(rows),
    ]
    parts += [_ops(rows), _emulated(rows), _missing(rows)]
    return [*head, *(line for part in parts if part for line in ("", *part))]


def _done(rows: Rows, kind: str) -> Pairs:
    for job in rows:
        row = job["row"]
        if job["kind"] == kind and row is not None and "fault" not in row:
            yield job, row


def _means(rows: Rows) -> list[str]:
    """Return the headline table: the speed-up of each way over all models with both ways."""
    factors: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for _, row in _done(rows, "latency"):
        for way, ratios in row["ratio"].items():
            for base, (factor, _, _) in ratios.items():
                factors[way].setdefault(base, []).append(factor)
    table = [
        (WAYS[way].name, *(_mean(found[base]) if base in found else "–" for base in BASELINES))
        for way, found in factors.items()
        if found
    ]
    head = ("way", *(f"vs {WAYS[base].name}" for base in BASELINES))
    notes = ["Geometric means over a way's models, with the minimum and their number: compare only equal numbers."]
    return ["## Speed-ups", "", *notes, "", *measure.markdown(head, table)] if table else []


def _mean(factors: Sequence[float]) -> str:
    mean = math.exp(sum(map(math.log, factors)) / len(factors))
    return f"{mean:.2f}× ({min(factors):.2f}, {len(factors)})"


def _latencies(rows: Rows) -> list[str]:
    peak = next((row["float16"] for _, row in _done(rows, "ceilings")), None)
    table: list[tuple[str, ...]] = []
    for job, row in _done(rows, "latency"):
        table += [_latency(job, row, way, peak) for way in row["time"]]
        table += [(job["model"], WAYS[way].name, _cell(why), *["–"] * 12) for way, why in row["faults"].items()]
    head = ("model", "way", "ms", "p5–p95", *(f"vs {WAYS[base].name}" for base in BASELINES), "TFLOP/s", "of the best")
    more = ("MB", "error L2", "error max", "not finite", "same argmax", "MHz, W, °C")
    notes = [
        "All ways of a model alternate in one process; speed-ups have a 95% interval over rounds. Inputs and outputs",
        "stay on the device, and each run is synchronized. Errors are relative to float32. `of the best`: relative to",
        "PyTorch's best float16 product here. `MB`: memory in addition to the ways opened before.",
    ]
    return ["## Inference", "", *notes, "", *measure.markdown((*head, *more), table)] if table else []


def _latency(job: Mapping[str, Any], row: Mapping[str, Any], way: str, peak: float | None) -> tuple[str, ...]:
    timing, error, ratios = row["time"][way], row["error"][way], row["ratio"][way]
    rate = job["flops"] / timing["median"] / 1e12
    card = ", ".join(f"{x:.0f}" for x in timing["card"]) if timing["card"] else "–"
    memory = row["memory"].get(way)
    return (
        *(job["model"], WAYS[way].name, _ms(timing["median"]), f"{_ms(timing['p5'])}–{_ms(timing['p95'])}"),
        *(_ratio(ratios.get(base)) for base in BASELINES),
        f"{rate:.3g}",
        "–" if peak is None else f"{100 * rate / peak:.0f}%",
        "–" if memory is None else f"{memory / 1e6:.0f}",
        *(_error(error[kind]) for kind in ("l2", "largest")),
        "–" if error["nonfinite"] is None else str(error["nonfinite"]),
        "–" if error["argmax"] is None else f"{error['argmax']:.3f}",
        card,
    )


def _cell(text: str) -> str:
    """Escape a text for a table cell."""
    return text.replace("|", "\\|")


def _ratio(found: Sequence[float] | None) -> str:
    return "–" if found is None else f"{found[0]:.2f}× ({found[1]:.2f}–{found[2]:.2f})"


def _ceilings(rows: Rows) -> list[str]:
    for _, row in _done(rows, "ceilings"):
        products = ", ".join(f"{word} {rate:.0f}" for word, rate in row.items() if word != "copy")
        return ["## The GPU's best performance", "", f"Products, TFLOP/s: {products}. A copy: {row['copy']:.2f} TB/s."]
    return []


def _variants(rows: Rows) -> list[str]:
    table = []
    for job, row in _done(rows, "variants"):
        for key, timing in row["time"].items():
            way, _, word = key.rpartition(" ")
            rate, plain = row["rate"][key], row["time"].get(f"{way} plain")
            factor = "–" if plain is None else f"{plain['median'] / timing['median']:.2f}×"
            joules = "–" if rate["joules"] is None else f"{rate['joules']:.3g}"
            cells = (_ms(timing["median"]), factor, _ms(rate["seconds"]), joules)
            table.append((job["model"], WAYS[way].name, word, *cells))
        table += [(job["model"], key, _cell(why), *["–"] * 4) for key, why in row["faults"].items()]
    head = ("model", "way", "setting", "ms", "vs plain", "queued, ms", "J per run")
    return ["## CUDA graphs, NHWC, queued runs", "", *measure.markdown(head, table)] if table else []


def _kernels(rows: Rows) -> list[str]:
    table = []
    for job, row in _done(rows, "kernels"):
        for way, found in row["kernels"].items():
            groups = sorted(found["groups"].items(), key=lambda pair: -pair[1][1])
            shares = ", ".join(f"{group} {launches:.0f}: {us:.0f}" for group, (launches, us) in groups)
            numbers = (f"{found['wall_us']:.0f}", f"{found['busy_us']:.0f}", f"{found['launches']:.0f}")
            table.append((job["model"], WAYS[way].name, *numbers, shares or "–"))
    head = ("model", "way", "run, µs", "kernels, µs", "launches", "groups by name, launches: µs")
    return ["## Kernels", "", *measure.markdown(head, table)] if table else []


def _beside(rows: Rows) -> list[str]:
    table = [
        (job["model"], way, _ms(timing["median"]), *(_ratio(row["ratio"][way].get(base)) for base in BASES), *errors)
        for job, row in _done(rows, "beside")
        for way, timing in row["time"].items()
        for errors in [[_error(row["error"][way][kind]) for kind in ("l2", "largest")]]
    ]
    head = ("model", "way", "ms", *(f"vs {base}" for base in BASES), "error L2", "error max")
    text = (
        "All ways of a model alternate in one process; each has float32 inputs and outputs. `_one` is a batch of one."
        " Errors are relative to onnxruntime's float32."
    )
    return ["## Compared with PyTorch", "", text, "", *measure.markdown(head, table)] if table else []


def _trials(rows: Rows) -> list[str]:
    table = [
        (job["trial"], job["model"], choice, _ms(timing["median"]), _ratio(row["ratio"][choice]))
        for job, row in _done(rows, "trials")
        for choice, timing in row["time"].items()
    ]
    head = ("trial", "model", "choice", "ms", "vs the first")
    return ["## Trials", "", *measure.markdown(head, table)] if table else []


def _training(rows: Rows) -> list[str]:
    table = []
    for job, row in _done(rows, "training"):
        for entry in row["bench"]["entries"]:
            sample = f"{1e6 * entry['latency']['median'] / row['batch']:.3g}"
            factors = [_factor(found) for found in entry["speed_ups"].values()]
            memory = "–" if entry["memory"] is None else f"{entry['memory'] / 1e6:.0f}"
            table.append((job["policy"], entry["name"], str(row["batch"]), sample, ", ".join(factors), memory))
    head = ("policy", "step in", "batch", "µs per sample", "vs float32, and vs TF32", "peak MB")
    return ["## A training step of the dense network", "", GUIDE, "", *measure.markdown(head, table)] if table else []


def _ops(rows: Rows) -> list[str]:
    """Return the errors of single ops, the worst predicted first."""
    found = [one for _, row in _done(rows, "ops") for one in row["ops"]]
    ran = [one for one in found if "fault" not in one]
    table = [
        (one["case"], _error(one["on_device"]), _error(one["emulated"]), f"{one['equal']:.1%}")
        for one in sorted(ran, key=lambda one: one["equal"])
    ]
    head = ("op and shapes", "error on device", "error emulated", "equal results")
    text = "RMS errors of float16 with normal inputs; equal results are those predicted exactly by the emulation."
    faults = [f"- {one['case']}: {one['fault']}" for one in found if "fault" in one]
    return ["## Ops and their emulation", "", text, "", *measure.markdown(head, table), *faults] if table else []


def _emulated(rows: Rows) -> list[str]:
    """Return the errors of emulated models, the worst ratio first."""
    found = sorted(_done(rows, "emulation"), key=lambda pair: -_off(pair[1]["ratio"]))
    table = [
        (
            *(job["model"], job["to"], "–" if row["ratio"] is None else f"{row['ratio']:.2f}"),
            *(_error(row[side]["l2"]) for side in ("on_device", "emulated", "apart")),
            f"{row['on_device']['nonfinite']} / {row['emulated']['nonfinite']}",
        )
        for job, row in found
    ]
    head = ("model", "type", "ratio", "error on device", "error emulated", "device to emulation", "not finite")
    text = "L2 errors relative to float32 without TF32. A ratio of 1 means that the emulation errs like the device."
    return ["## Emulation and the device", "", text, "", *measure.markdown(head, table)] if table else []


def _off(ratio: float | None) -> float:
    return 0.0 if not ratio else max(ratio, 1 / ratio)


def _missing(rows: Rows) -> list[str]:
    lines = [f"- {job['name']}: {job['row']['fault']}" for job in rows if job["row"] and "fault" in job["row"]]
    for kind in ("kernels", "beside", "trials"):
        for job, row in _done(rows, kind):
            lines += [f"- {job['name']}, {way}: {why}" for way, why in row["faults"].items()]
    late = [job["name"] for job in rows if job["row"] is None]
    lines += [f"- not yet measured: {', '.join(late)}"] if late else []
    return ["## Missing rows", "", *lines] if lines else []


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _factor(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    interval = "" if found["low"] is None else f" ({found['low']:.2f}–{found['high']:.2f})"
    return f"{found['factor']:.2f}×{interval}"
