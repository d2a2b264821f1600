"""Losses of small transformers trained in float16, compared with float32, here and with torch.amp.

    python benchmarks/run.py fine_tuning [--models bert gpt2 vit llama] [--seeds 5] [--steps 100] [--jobs 1]

This needs torch, transformers and onnxscript. Each model has two layers. A seed determines its initial weights and the
batches. Trainings with Adam see the same batches: float32 and mixed_float16 of this package, and PyTorch's float32 and
torch.autocast, in float16 with GradScaler and in bfloat16, all on a CPU. Both loss scales start at 2¹⁵. A training's
distance is the largest difference of a loss from the float32 training on the same side.

Here float16 is emulated: every result is rounded to float16, but sums inside an op are float32. PyTorch uses its own
float16 kernels, and computes the loss from float32 logits, like transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.shared import measure

if TYPE_CHECKING:
    import torch

    from amp_rewrite.train import Trainer

RATE, ROWS, TOKENS, WORDS, CLASSES = 5e-4, 16, 16, 256, 10
SCALE = 2.0**15
TOLERANCE = 1e-4
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model of transformers with its batches. `axis`: the class axis of the logits."""

    title: str
    module: Callable[[], Any]
    batch: Callable[[np.random.Generator], Batch]
    axis: int


def _text(rng: np.random.Generator) -> Batch:
    """Return rows counting up from a random number by 1, 2 or 3."""
    start, by = rng.integers(0, WORDS - 3 * TOKENS, (ROWS, 1)), rng.integers(1, 4, (ROWS, 1))
    words = start + by * np.arange(TOKENS + 1)
    return {"input_ids": words[:, :-1], "attention_mask": np.ones((ROWS, TOKENS), np.int64), "labels": words[:, 1:]}


def _classified(rng: np.random.Generator) -> Batch:
    """Return the rows of `_text`, with the step as their class."""
    batch = _text(rng)
    words = batch["input_ids"]
    return {**batch, "labels": words[:, 1] - words[:, 0]}


def _images(rng: np.random.Generator) -> Batch:
    """Return noise with bright rows at a position given by the class."""
    labels = rng.integers(0, CLASSES, ROWS)
    images = rng.standard_normal((ROWS, 3, 32, 32)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[:, 3 * label : 3 * label + 3] += 1
    return {"pixel_values": images, "labels": labels}


def _bert() -> Any:
    import transformers as hf

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {**_WIDTH, "vocab_size": WORDS, "max_position_embeddings": TOKENS, "num_labels": CLASSES}
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, **none))


def _gpt2() -> Any:
    import transformers as hf

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **none))


def _vit() -> Any:
    import transformers as hf

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.ViTForImageClassification(hf.ViTConfig(**_WIDTH, **none, image_size=32, patch_size=8, num_labels=CLASSES))


def _llama() -> Any:
    import transformers as hf

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**_WIDTH, **ends, vocab_size=WORDS, max_position_embeddings=TOKENS, num_key_value_heads=2)
    )


_WIDTH = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SUBJECTS = {
    "bert": Subject("BERT", _bert, _classified, 1),
    "gpt2": Subject("GPT-2", _gpt2, _text, -1),
    "vit": Subject("ViT", _vit, _images, 1),
    "llama": Subject("Llama", _llama, _text, -1),
}


def made(subject: Subject, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return subject.module().eval()  # the models have no dropout


def batches(subject: Subject, seed: int, steps: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [subject.batch(rng) for _ in range(steps)]


# -- the two sides -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """The losses of one training, and the number of steps skipped by its loss scale."""

    losses: Sequence[float]
    skipped: int

    def distance(self, other: Training) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


class Ours:
    """Trainers of one exported model, restarted from each module's weights."""

    def __init__(self, subject: Subject) -> None:
        from amp_rewrite.train import Adam, Trainer, from_torch, training_step

        module, (batch,) = made(subject, 0), batches(subject, 0, 1)
        module.config.use_cache = False
        model = from_torch(module, {name: array for name, array in batch.items() if name != "labels"})
        loss = f"cross_entropy(logits, labels, axis={subject.axis})"
        rule = Adam(RATE, epsilon=1e-8)
        steps = {policy: training_step(model, loss=loss, optimizer=rule, policy=policy) for policy in POLICIES}
        self.trainers = {
            policy: Trainer(step, providers=("CPUExecutionProvider",), threads=1) for policy, step in steps.items()
        }
        self.starts = {policy: trainer.state for policy, trainer in self.trainers.items()}

    def train(self, policy: str, module: torch.nn.Module, data: Sequence[Batch]) -> Training:
        trainer: Trainer = self.trainers[policy]
        weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
        missing = weights.keys() - self.starts[policy].keys()
        if missing:
            raise SystemExit(f"the exported model lacks {', '.join(sorted(missing))}")
        before = trainer.skipped
        trainer.set_state({**self.starts[policy], **weights})
        return Training(trainer.fit(list(data)).losses, trainer.skipped - before)


POLICIES = ("float32", "mixed_float16")


def theirs(subject: Subject, module: torch.nn.Module, data: Sequence[Batch], low: torch.dtype | None) -> Training:
    """Train with PyTorch's loop. `low`: the autocast type."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.Adam(module.parameters(), RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=low is torch.float16)
    losses, skipped = [], 0
    for batch in data:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}
        labels = tensors.pop("labels")
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low) if low else nullcontext():
            logits = module(**tensors).logits
        loss = F.cross_entropy(logits.float().movedim(subject.axis, 1), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    return Training(losses, skipped)


# -- results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seed:
    """One seed's distances from float32, skipped steps, and the distance between the two float32 trainings."""

    model: str
    seed: int
    first_loss: float
    last_loss: float
    ours: float
    float16: float
    bfloat16: float
    ours_skipped: int
    float16_skipped: int
    apart: float


def measured(name: str, seeds: int, steps: int) -> list[Seed]:
    import torch

    torch.set_num_threads(1)
    subject = SUBJECTS[name]
    ours, rows = Ours(subject), []
    for seed in range(seeds):
        data = batches(subject, seed, steps)
        here = {policy: ours.train(policy, made(subject, seed), data) for policy in POLICIES}
        kinds: Mapping[str, Any] = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
        there = {kind: theirs(subject, made(subject, seed), data, low) for kind, low in kinds.items()}
        plain, exact = here["float32"], there["float32"]
        rows.append(
            Seed(
                subject.title,
                seed,
                plain.losses[0],
                plain.losses[-1],
                here["mixed_float16"].distance(plain),
                there["float16"].distance(exact),
                there["bfloat16"].distance(exact),
                here["mixed_float16"].skipped,
                there["float16"].skipped,
                plain.distance(exact),
            )
        )
        print(name, rows[-1], flush=True)
    return rows


HEAD = ("model", "loss in float32, first → last step", "mixed_float16 here", "torch.amp float16", "ratio")
HEAD += ("torch.amp bfloat16", "skipped steps, here and torch.amp", "float32 here and in PyTorch")


def cells(rows: Sequence[Seed]) -> list[str]:
    ours, float16, bfloat16, apart = (
        statistics.median(getattr(row, kind) for row in rows) for kind in ("ours", "float16", "bfloat16", "apart")
    )
    ends = (statistics.median(row.first_loss for row in rows), statistics.median(row.last_loss for row in rows))
    skipped = (sum(row.ours_skipped for row in rows), sum(row.float16_skipped for row in rows))
    return [
        rows[0].model,
        f"{ends[0]:.2f} → {ends[1]:.2f}",
        f"{ours:.1e}",
        f"{float16:.1e}",
        f"{ours / float16:.2f}",
        f"{bfloat16:.1e}",
        f"{skipped[0]}, {skipped[1]}",
        f"{apart:.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="number of models at a time, each in a separate process")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(measured, name, args.seeds, args.steps) for name in args.models]
        results = {name: run.result() for name, run in zip(args.models, runs, strict=True)}
    for name, rows in results.items():
        if statistics.median(row.apart for row in rows) > TOLERANCE:
            print(f"{name}: the float32 trainings of the two sides differ; compare the distances with care")
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy", "torch", "transformers"))
    table = [
        f"Medians over {args.seeds} seeds of the largest difference of a loss from float32 in {args.steps} steps of"
        f" Adam at {RATE:g}, {ROWS} rows a batch, on a CPU.",
        "",
        *measure.markdown(HEAD, map(cells, results.values())),
    ]
    measure.write("fine_tuning", about, [row for rows in results.values() for row in rows], table)


if __name__ == "__main__":
    main()
