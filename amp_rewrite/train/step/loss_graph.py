"""The graph of a model's loss and gradients, for custom loops: parameters, buffers and random state are inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import RandomState
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.settings.policy import Policy
from amp_rewrite.settings.request import Painting
from amp_rewrite.train.objective.parameters import ParameterGlobs, trained
from amp_rewrite.train.objective.prediction import TargetInput
from amp_rewrite.train.step.assembly import Prepared, lowered
from amp_rewrite.train.step.batch_check import batch_model
from amp_rewrite.train.step.training_report import TrainingReport, model_name
from amp_rewrite.train.update.graph import Buffers


@dataclass(frozen=True, eq=False)
class LossGraph:
    """A runner with the names of its values.

    `gradients`: outputs by parameter. `buffers`: the running statistics by input, each with its output and its first
    value. `random`: the inputs of the random state. `source`: the model as it was given. `declared`: a model of the
    inputs of a batch. `target`: that of the loss.
    """

    runner: Runner
    providers: tuple[str, ...]
    initial: Mapping[str, Array]
    loss: str
    metrics: tuple[str, ...]
    seed: str
    gradients: Mapping[str, str]
    buffers: Buffers
    random: RandomState | None
    source: Model
    declared: Model
    target: TargetInput | None
    fingerprint: str
    report: TrainingReport


def loss_graph(
    source: Model, loss: str, choice: ParameterGlobs, policy: Policy, training_mode: bool, painting: Painting
) -> LossGraph:
    """Build the graph of a loss of a model and open it, on CUDA if available, else emulated on the CPU.

    Errors are those of `training_step`.
    """
    held = choice.freezes if training_mode else None
    ready = Prepared.of(source, loss, held, lambda view, name: trained(view, name, choice))
    b, aim = ready.b, ready.aim
    seed = b.input("seed", DType.FLOAT, ())
    grads = {
        name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=gradient)
        for name, gradient in ready.gradients(seed).items()
    }
    buffers = {
        name: (b.output(f"{name}_next", DType.FLOAT, start.shape, source=new), start)
        for name, (new, start) in ready.buffers.items()
    }
    whole = ready.with_results((*grads.values(), *(new for new, _ in buffers.values())))
    random = () if ready.random is None else (ready.random.state, ready.random.replica)
    taken = {seed, *ready.initial, *buffers, *random, *(tensor.name for tensor in whole.proto.graph.initializer)}
    batch = [v.name for v in whole.proto.graph.input if v.name not in taken]
    result, conversion = lowered(whole, policy, painting)
    providers = (CUDA, CPU) if cuda_opens() else (CPU,)
    if conversion is not None and CUDA not in providers:
        result = emulate(result)
    report = TrainingReport(model_name(source), loss, ready.selection.rows, ready.notes, conversion)
    return LossGraph(
        runner=Runner.open(result, SessionOptions(providers=providers)),
        providers=providers,
        initial=ready.initial,
        loss=aim.loss,
        metrics=aim.metrics,
        seed=seed,
        gradients=grads,
        buffers=buffers,
        random=ready.random,
        source=source,
        declared=batch_model(whole, batch),
        target=aim.target,
        fingerprint=fingerprint(source).graph,
        report=report,
    )
