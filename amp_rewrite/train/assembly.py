"""What a training step and a differentiable loss are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnx import ValueInfoProto
from onnx.helper import make_tensor_value_info

from amp_rewrite.decide import reasons
from amp_rewrite.decide.pin import Pin
from amp_rewrite.deploy.session import process
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.pipeline.convert import finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.report import Report
from amp_rewrite.settings.options import Painting, Request
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train import losses
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.gradients import differentiable
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step import update
from amp_rewrite.train.training_mode import statistics

Buffers = Mapping[str, tuple[str, Array]]
"""What the forward pass moves: by the name of its input the name of its new value, and the initial one."""


def policy_of(policy: str | Policy | None) -> Policy:
    """A policy to train under; None is that of the process if one was set, else mixed_float16.

    PolicyError for one that does not keep parameters and results in float32.
    """
    if policy is None:
        policy = process.global_policy() if process.policy_was_set() else "mixed_float16"
    chosen = Policy.of(policy)
    if chosen.param is not DType.FLOAT or chosen.output is not DType.FLOAT:
        raise PolicyError(
            f"policy {chosen.name!r} does not keep parameters and results in float32, and a training step does;"
            " use mixed_float16, mixed_bfloat16 or float32"
        )
    if chosen.compute is not DType.FLOAT and chosen.lowers is None:
        raise PolicyError(f"policy {chosen.name!r} computes in no type that a training step knows; use float16")
    return chosen


def with_inputs(model: Model, loss: str, names: Sequence[str]) -> tuple[Model, dict[str, Array], Buffers]:
    """The model ready for `backward`, with what a step changes as inputs; the initial parameters, and the buffers."""
    graph = model.proto.graph
    moved = statistics(graph.node, (t.name for t in graph.initializer))
    b = Builder.of(differentiable(model, loss, names))
    initial = {name: _initial(b, name) for name in names}
    buffers = {name: (new, _initial(b, name)) for name, new in moved.items()}
    for name in (*initial, *buffers):
        b.promote(name)
    return b.model(), initial, buffers


def _initial(b: Builder, name: str) -> Array:
    value = b.known(name)
    assert value is not None and value.tensor is not None
    array: Array = b.facts.view.model.array(value.tensor).copy()
    return array


def declared_scalar(name: str, shape: tuple[int, ...] = ()) -> ValueInfoProto:
    """The declaration of a loss or a metric."""
    info: ValueInfoProto = make_tensor_value_info(name, DType.FLOAT.code, shape)
    return info


def with_outputs(model: Model, told: Sequence[ValueInfoProto], kept: Sequence[str]) -> Model:
    """The model with these outputs in this order, and no others: new ones, and some that it has."""
    proto = clone(model.proto)
    declared = {v.name: v for v in proto.graph.output}
    refill(proto.graph, "output", [*told, *(declared[name] for name in kept)])
    return replace(model, proto=proto)


def lowered(whole: Model, policy: Policy, painting: Painting) -> tuple[Model, Report | None]:
    """The graph under the policy, with the reasons; the loss that was appended and the update stay float32.

    PolicyError for arguments that name how to lower where nothing is lowered, or that lower what must not be.
    """
    unknown = next((name for name in painting if name not in Painting.__optional_keys__), None)
    if unknown is not None:
        raise TypeError(f"training_step() got an unexpected keyword argument {unknown!r}")
    if policy.lowers is None:
        if painting:
            raise PolicyError(f"{', '.join(painting)} says how to lower, and policy {policy.name!r} lowers nothing")
        return whole, None
    draft = Draft.of(whole, Request.of(to=policy.lowers, fuse="none", **painting))
    pins = tuple(Pin(op.id, rule, None, "") for op in draft.view.ops if (rule := _float32_by(op.name)) is not None)
    clash = next((p.op for p in pins if p.op in draft.lower), None)
    if clash is not None:
        raise PolicyError(
            f"lower {draft.lower[clash]!r} names node {draft.view.ops[clash].name!r}, which a training step computes in"
            " float32; narrow the pattern"
        )
    made = finish(draft, draft.paint(pins))
    return made.result, made.report


_REGIONS = {f"{update.REGION}/": reasons.UPDATE, f"{losses.REGION}/": reasons.LOSS}


def _float32_by(name: str) -> str | None:
    """The rule that holds a node in float32, by its name."""
    return next((rule for prefix, rule in _REGIONS.items() if name.startswith(prefix)), None)
