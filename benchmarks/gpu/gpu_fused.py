"""Effects of fusions on the models of the GPU measurement, without a GPU: nodes, Casts and emulated errors.

    python benchmarks/run.py gpu_fused SKELETONS [--only NAME …] [--errors TYPE …] [--page]     # after gpu_make

It counts the nodes that onnxruntime's optimizer leaves on CUDA at its default level, with stub libraries
(tests/support/cuda_stub). Each float16 file is also opened on the CPU. `--errors` runs a batch of one in float32 and
emulated, with and without fusions; models without a skeleton of that batch are exported, which needs torch and
transformers. Each model takes up to 8 GB of memory and several minutes; other rows keep their numbers. `--page` updates
the last part of docs/evidence/fusion.md, and only measures models that are named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_models, skeleton_files
from benchmarks.shared import measure

PAGE = measure.ROOT / "docs" / "evidence" / "fusion.md"
HEADING = "## For CUDA's kernels"
NAMES = tuple(name for name in gpu_models.REAL if not name.endswith("_one"))
FUSE: Mapping[str, Mapping[str, Any]] = {"none": {"fuse": "none"}, "default": {}}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Cast": ("Cast",),
    "MatMul": ("MatMul", "FusedMatMul"),
    "Gemm": ("Gemm",),
    "Conv": ("Conv", "FusedConv"),
    "attention": ("MultiHeadAttention", "GroupQueryAttention", "Attention"),
    "norm": (
        *("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization"),
        *("RMSNormalization", "SkipSimplifiedLayerNormalization"),
    ),
    "GELU, SiLU": ("Gelu", "BiasGelu", "FastGelu", "QuickGelu"),
    "Expand, Concat": ("Expand", "Concat"),
}
"""Columns of the table, with the op types of each."""
Counts = dict[str, int]
Row = dict[str, Any]


def counts(file: Path) -> Counts:
    """Count an optimized graph's nodes: all, by group, sums with a bias of three axes, and causal attentions."""
    import onnx

    from amp_rewrite.files.protos import all_nodes

    model = onnx.load(file, load_external_data=False)
    nodes = list(all_nodes(model.graph.node))
    kinds = Counter(node.op_type for node in nodes)
    wide = {
        tensor.name for tensor in model.graph.initializer if list(tensor.dims[:2]) == [1, 1] and len(tensor.dims) == 3
    }
    causal = [n for n in nodes if any(a.name == "unidirectional" and a.i for a in n.attribute)]
    found = {"nodes": len(nodes)} | {group: sum(kinds[kind] for kind in names) for group, names in GROUPS.items()}
    found["Add of rank 3"] = sum(node.op_type == "Add" and bool(wide & set(node.input)) for node in nodes)
    found["causal"] = len(causal) + kinds["GroupQueryAttention"]
    return found


def optimized(file: Path, provider: str) -> Counts:
    """Optimize a model with onnxruntime at its default level; return the counts of the optimized graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_reuse = False  # the model does not run
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
        chosen = list(dict.fromkeys((provider, "CPUExecutionProvider")))
        session = onnxruntime.InferenceSession(str(file), options, providers=chosen, enable_fallback=0)
        if session.get_providers()[0] != provider:
            raise LookupError(f"{provider} does not work here")
        return counts(Path(folder) / "optimized.onnx")


def under_stub(file: Path) -> Counts:
    """Return the counts of a graph optimized for CUDA, in a process with the stub libraries."""
    from support import stub

    libraries, why = stub.folder()
    if libraries is None:
        raise LookupError(why)
    path = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
    command = [*map(str, measure.script("gpu_fused")), str(file), "--count"]
    done = subprocess.run(
        command, env={**os.environ, "LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LookupError(done.stderr[-400:])
    found: Counts = json.loads(done.stdout.splitlines()[-1])
    return found


# -- one model, each step in a separate process -------------------------------------------------------


def source(name: str, folder: str, skeletons: str) -> str:
    """Write the float32 model of a skeleton, or else export it, with its batch; return its path."""
    from benchmarks.gpu.gpu_make import kept

    target, chosen = Path(folder), Path(folder) / "chosen"
    file = target / f"{name}.float32.onnx"
    packed = Path(skeletons)
    if not (packed / f"{name}.recipes.json").exists() and kept(name).exists():
        packed = target / "packed"
        skeleton_files.unpack(kept(name), packed)
    if (packed / f"{name}.recipes.json").exists():
        skeleton_files.select(packed, name, ("float32",), chosen)
        skeleton_files.regrow(chosen, target, name)
        return str(file)
    import numpy as np

    built = single(name.removesuffix("_one"))
    built.write(file)
    np.savez(target / f"{name}.npz", **built.inputs)
    return str(file)


def single(name: str) -> gpu_models.Source:
    """Return a model of the measurement with a batch of one."""
    if name == "dense":
        return gpu_models.Dense(64, 784, 4096)
    import torch

    from benchmarks.gpu import gpu_builds

    built = {
        "bert_large": lambda: gpu_builds.bert(1, 384, **gpu_builds.LARGE),
        "unet": lambda: gpu_builds.unet(1, 64),
        "whisper": lambda: gpu_builds.sounds(1),
        "gpt2_step": lambda: gpu_builds.gpt2_step(1, 511),
    }[name]
    torch.manual_seed(gpu_builds.SEED)
    return gpu_builds.Module(built())


def converted(file: str, target: str, options: Mapping[str, Any]) -> None:
    """Write a conversion."""
    import amp_rewrite

    amp_rewrite.convert(file, **options).save(target, overwrite=True)


def outputs(file: str, batch: str, target: str, emulated: bool) -> None:
    """Write a model's outputs for a batch on the CPU, emulated or not."""
    import numpy as np

    import amp_rewrite
    from benchmarks.gpu.gpu_rows import _outputs

    if emulated:
        twin = f"{file}.twin.onnx"
        amp_rewrite.emulate(file).save(twin, overwrite=True)
        file = twin
    found = _outputs(Path(file), gpu_models.batch_of(Path(batch)), "CPUExecutionProvider")
    np.savez(target, *(array.astype(np.float32) for array in found))


def errors(name: str, skeletons: str, to: str) -> Row:
    """Return a model's emulated errors with a batch of one, without and with fusions."""
    import numpy as np

    from benchmarks.gpu.gpu_turns import error

    row: Row = {}
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        file = measure.apart(source, f"{name}_one", folder, skeletons)
        batch, wanted = file.replace(".float32.onnx", ".npz"), f"{folder}/wanted.npz"
        measure.apart(outputs, file, batch, wanted, False)
        for key, options in FUSE.items():
            made, found = f"{folder}/made.onnx", f"{folder}/found.npz"
            measure.apart(converted, file, made, {**options, "to": to})
            measure.apart(outputs, made, batch, found, True)
            with np.load(wanted) as a, np.load(found) as b:
                distance = error([a[k] for k in a.files], [b[k] for k in b.files])
            row[key] = {key: distance[key] for key in ("l2", "largest", "nonfinite")}
    return row


def graphs(name: str, skeletons: str) -> Row:
    """Return a model's counts in float32, without fusions and by default; open the last on the CPU."""
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        file = measure.apart(source, name, folder, skeletons)
        row: Row = {"float32": under_stub(Path(file))}
        for key, options in FUSE.items():
            made = f"{folder}/{key}.onnx"
            measure.apart(converted, file, made, options)
            row[key] = under_stub(Path(made))
        measure.apart(optimized, Path(made), "CPUExecutionProvider")
        row["opens"] = True
    return row


# -- tables ------------------------------------------------------------------------------------------

COLUMNS = ("nodes", *GROUPS, "Add of rank 3", "causal")
TITLES = {
    "bert_base": "BERT-base",
    "resnet50": "ResNet-50",
    "llama": "Llama of 12 layers",
    "unet": "UNet",
    "bert_large": "BERT-large",
    "vit_base": "ViT-base",
    "gpt2": "GPT-2",
    "gpt2_step": "GPT-2, one step",
    "whisper": "Whisper's encoder",
    "dense": "dense",
}
TEXT = """The table counts the nodes in the graphs of the full-size GPU models, in float16 at opset 18, after
onnxruntime's optimizer at its default level on CUDA, with stub libraries. Each cell shows the float32 file,
`--fuse none` and the default, or one number if all three are equal. Each file also loads on the CPU at that level.
*Causal*: attention by
`unidirectional` or GroupQueryAttention, without a mask."""
LAYERS = """A BERT layer has six products, one attention, two norms, one GELU and one Add of a three-dimensional bias.
BERT-base exported at opset 23 has the same number of nodes in every column. Tests check this for small exports of BERT,
ViT, GPT-2 and Llama (`tests/suites/gpu/test_layers_under_stub.py`)."""
ERRORS = """The errors are emulated, with a batch size of one and random weights and data. *L2* is the root mean square
of the difference divided by that of the outputs; *largest* is the largest difference divided by the largest output.

For three draws of weights and tokens, GPT-2's L2 error is 1.44, 1.41 and 1.42e-3 without fusions; 1.45, 1.42 and
1.45e-3 by default; and 1.41, 1.37 and 1.38e-3 with only onnxruntime's operators, when each Gemm kept its bias (commit
d38bce87). A Gemm rounds once. A MatMul and the kernel after it round before the bias is added, after it is added, and
after the sum with the residuals, both on CUDA and under emulation. The kernel adds the bias to its first operand, so
the product must be the first. When the bias was added to the residuals, which are larger, the error was 1.55e-3, and
Whisper's was 1.64e-3 instead of 1.32e-3."""


def graph_table(rows: Mapping[str, Row]) -> list[str]:
    table = [
        (TITLES[name], *(_changes([row["graphs"][way][column] for way in ("float32", *FUSE)]) for column in COLUMNS))
        for name, row in rows.items()
        if "graphs" in row
    ]
    return measure.markdown(("model", *COLUMNS), table)


def _changes(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else " / ".join(map(str, numbers))


def error_table(rows: Mapping[str, Row]) -> list[str]:
    table = [
        (TITLES[name], to, *(f"{found[way][kind]:.2e}" for kind in ("l2", "largest") for way in FUSE))
        for name, row in rows.items()
        for to, found in row.get("errors", {}).items()
    ]
    head = ("model", "type", "L2, `--fuse none`", "L2, default", "largest, `--fuse none`", "largest, default")
    return measure.markdown(head, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--errors", nargs="+", choices=("float16", "bfloat16"), default=(), metavar="TYPE")
    parser.add_argument("--page", action="store_true", help="update the table in docs/evidence/fusion.md")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        print(json.dumps(optimized(args.skeletons, "CUDAExecutionProvider")))
        return
    stored = measure.RESULTS / "gpu_fused.json"
    saved = json.loads(stored.read_text("utf-8"))["rows"] if stored.exists() else []
    known: dict[str, Row] = {row.pop("model"): row for row in saved}
    for name in args.only or (() if args.page else NAMES):
        for kind, found in measured(name, str(args.skeletons), args.errors):
            known.setdefault(name, {}).setdefault(kind, {}).update(found)
            write({name: known[name] for name in NAMES if name in known})
    if args.page:
        page({name: known[name] for name in NAMES if name in known})


def measured(name: str, skeletons: str, types: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Measure a model; yield its graphs, or its errors in some types."""
    start = time.perf_counter()
    if types:
        for to in types:
            yield "errors", {to: errors(name, skeletons, to)}
    else:
        yield "graphs", graphs(name, skeletons)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def write(rows: Mapping[str, Row]) -> None:
    about = measure.machine(("onnx", "numpy", "onnxruntime-gpu"))
    table = [*graph_table(rows), "", *error_table(rows)]
    measure.write("gpu_fused", about, [{"model": name, **row} for name, row in rows.items()], table)


def page(rows: Mapping[str, Row]) -> None:
    """Write the tables as the last part of the page."""
    from benchmarks.gpu.gpu_make import commit

    about = measure.machine(("onnxruntime-gpu",))
    versions = dict(about["versions"])  # type: ignore[call-overload]
    where = f"{about['date']}, {about['cpu']}, commit {commit()}, onnxruntime-gpu {versions['onnxruntime-gpu']}."
    parts = [[TEXT], [where], graph_table(rows), [LAYERS], [ERRORS], error_table(rows)]
    before = PAGE.read_text("utf-8").partition(HEADING)[0]
    text = "\n\n".join("\n".join(part) for part in parts)
    PAGE.write_text(f"{before}{HEADING}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
