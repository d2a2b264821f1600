"""The graph of a model's loss and gradients, for custom loops: parameters, buffers and random state are inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.gradients import backward
from amp_rewrite.rewrite.autodiff.lowering.opset import for_gradients
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import RandomState, with_random_state
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.settings.loss_scale import Array
from amp_rewrite.settings.options import Painting
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.objective.losses import objective
from amp_rewrite.train.objective.module_parameters import ModuleParameters
from amp_rewrite.train.objective.parameters import Choice, trained
from amp_rewrite.train.objective.repeated_rows import with_one_row
from amp_rewrite.train.objective.training_mode import in_training
from amp_rewrite.train.step.assembly import lowered, with_inputs, with_outputs
from amp_rewrite.train.step.training_report import TrainingReport, model_name
from amp_rewrite.train.update.graph import Buffers


@dataclass(frozen=True)
class LossSettings:
    """How a loss is built: its policy, the parameters that are trained, training mode, and how ops are lowered."""

    policy: Policy
    parameters: str | Sequence[str] | None = None
    freeze: str | Sequence[str] = ()
    training_mode: bool = False
    painting: Painting = field(default_factory=Painting)


@dataclass(frozen=True, eq=False)
class LossGraph:
    """A runner with the names of its values.

    `gradients`: outputs by parameter. `buffers`: the running statistics by input, each with its output and its first
    value. `random`: the inputs of the random state. `source`: the model as it was given.
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
    fingerprint: str
    report: TrainingReport


def loss_graph(given: object, source: Model, loss: str, settings: LossSettings) -> LossGraph:
    """Build the graph of a loss of a model and open it, on CUDA if available, else emulated on the CPU.

    `given`: what the model was loaded from. Errors are those of `training_step`.
    """
    at_opset, moved = for_gradients(source)
    aim = objective(in_training(at_opset) if settings.training_mode else at_opset, loss)
    choice = Choice(settings.parameters, settings.freeze, ModuleParameters.of(given, source))
    selection = trained(View.of(aim.model), aim.loss, choice)
    names = selection.names
    stateful, random = with_random_state(with_one_row(aim.model, selection.one_row))
    ready, initial, buffers = with_inputs(stateful, aim.loss, names)
    b = Builder.of(ready)
    seed = b.input("seed", DType.FLOAT, ())
    computed = backward(b, {aim.loss: seed}, names)
    grads = {name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=computed[name]) for name in names}
    given_out = {
        name: (b.output(f"{name}_next", DType.FLOAT, start.shape, source=new), start)
        for name, (new, start) in buffers.items()
    }
    results = [declared(aim.loss, DType.FLOAT, aim.shape), *(declared(m, DType.FLOAT, ()) for m in aim.metrics)]
    kept = (*grads.values(), *(new for new, _ in given_out.values()))
    whole = with_outputs(b.model(), results, kept)
    result, conversion = lowered(whole, settings.policy, settings.painting)
    providers = (CUDA, CPU) if cuda_opens() else (CPU,)
    if conversion is not None and CUDA not in providers:
        result = emulate(result)
    report = TrainingReport(model_name(source), loss, selection.rows, (*aim.notes, *moved), conversion)
    return LossGraph(
        runner=Runner.open(result, SessionOptions(providers=providers)),
        providers=providers,
        initial=initial,
        loss=aim.loss,
        metrics=aim.metrics,
        seed=seed,
        gradients=grads,
        buffers=given_out,
        random=random,
        source=source,
        fingerprint=fingerprint(source).graph,
        report=report,
    )
