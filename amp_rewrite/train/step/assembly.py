"""Parts shared by the training step and the model loss: policy, inputs, outputs, lowering."""

from __future__ import annotations

from collections.abc import Sequence
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
from amp_rewrite.settings.options import PAINTING, Painting, Request
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.gradients import differentiable
from amp_rewrite.train.objective import losses
from amp_rewrite.train.objective.training_mode import statistics
from amp_rewrite.train.update.graph import REGION, Buffers
from amp_rewrite.train.update.loss_scale import Array


def policy_of(policy: str | Policy | None) -> Policy:
    """Return the policy of a step; for None that of the process if set, else mixed_float16.

    PolicyError for a policy that does not keep parameters and results in float32.
    """
    if policy is None:
        policy = process.global_policy() if process.policy_was_set() else "mixed_float16"
    chosen = Policy.of(policy)
    if chosen.param is not DType.FLOAT or chosen.output is not DType.FLOAT:
        raise PolicyError(
            f"policy {chosen.name!r} does not keep parameters and results in float32, as a training step must;"
            " use mixed_float16, mixed_bfloat16 or float32"
        )
    if chosen.compute is not DType.FLOAT and chosen.lowers is None:
        raise PolicyError(f"policy {chosen.name!r} computes in a type that a training step does not have; use float16")
    return chosen


def with_inputs(model: Model, loss: str, names: Sequence[str]) -> tuple[Model, dict[str, Array], Buffers]:
    """Return the model ready for `backward`, with parameters and buffers as inputs, and their initial values."""
    graph = model.proto.graph
    updated = statistics(graph.node, (t.name for t in graph.initializer))
    b = Builder.of(differentiable(model, loss, names))
    initial = {name: _initial(b, name) for name in names}
    buffers = {name: (new, _initial(b, name)) for name, new in updated.items()}
    for name in (*initial, *buffers):
        b.promote(name)
    return b.model(), initial, buffers


def _initial(b: Builder, name: str) -> Array:
    value = b.known(name)
    assert value is not None and value.tensor is not None
    array: Array = b.facts.view.model.array(value.tensor).copy()
    return array


def declared_scalar(name: str, shape: tuple[int, ...] = ()) -> ValueInfoProto:
    """Declare a loss or a metric."""
    info: ValueInfoProto = make_tensor_value_info(name, DType.FLOAT.code, shape)
    return info


def with_outputs(model: Model, new: Sequence[ValueInfoProto], kept: Sequence[str]) -> Model:
    """Return the model with exactly these outputs in this order: new ones, then existing ones by name."""
    proto = clone(model.proto)
    declared = {v.name: v for v in proto.graph.output}
    refill(proto.graph, "output", [*new, *(declared[name] for name in kept)])
    return replace(model, proto=proto)


def lowered(whole: Model, policy: Policy, painting: Painting) -> tuple[Model, Report | None]:
    """Lower the graph under the policy and return it with the report; appended losses and the update stay float32.

    PolicyError for lowering options under a policy that lowers nothing, and for nodes that must stay float32.
    """
    unknown = next((name for name in painting if name not in PAINTING), None)
    if unknown is not None:
        raise TypeError(f"training_step() got an unexpected keyword argument {unknown!r}")
    if policy.lowers is None:
        if painting:
            raise PolicyError(
                f"{', '.join(painting)} configures lowering, but policy {policy.name!r} lowers nothing; remove the"
                " options, or use mixed_float16"
            )
        return whole, None
    draft = Draft.of(whole, Request.of(to=policy.lowers, fuse="none", **painting))
    pins = tuple(Pin(op.id, rule, None, "") for op in draft.view.ops if (rule := _float32_by(op.name)) is not None)
    clash = next((p.op for p in pins if p.op in draft.lower), None)
    if clash is not None:
        raise PolicyError(
            f"lower {draft.lower[clash]!r} matches node {draft.view.ops[clash].name!r}, which a training step computes"
            " in float32; narrow the pattern"
        )
    converted = finish(draft, draft.paint(pins))
    return converted.result, converted.report


_REGIONS = {f"{REGION}/": reasons.UPDATE, f"{losses.REGION}/": reasons.LOSS}


def _float32_by(name: str) -> str | None:
    """Rule that keeps a node in float32, by its name."""
    return next((rule for prefix, rule in _REGIONS.items() if name.startswith(prefix)), None)
