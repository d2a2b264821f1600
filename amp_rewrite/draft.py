"""All of a conversion that does not depend on what data shows: paint a draft again with other pins, and it is cheap."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.config import from_environment
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.expand import inline_functions, inline_schema_functions, select_masks, spell_out_casts
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.fuse.canonical import Fuse, canonical, followed
from amp_rewrite.lists import Level, OpLists, environment_edits, load_lists
from amp_rewrite.painting.color import Coloring
from amp_rewrite.painting.painter import paint
from amp_rewrite.pattern import io_types, overrides, parse_io
from amp_rewrite.pin import Cluster, Pin
from amp_rewrite.plan import Plan, plan_casts
from amp_rewrite.policy import AUTO, PROPAGATE, Placement, Policy, Safety, Target, low_type
from amp_rewrite.safety.cluster import clusters
from amp_rewrite.safety.hazards import Hazards, hazards
from amp_rewrite.view import OpId, ValueId, View

if TYPE_CHECKING:
    from amp_rewrite.opset import Opset
    from amp_rewrite.placement.place import Placing

ListSource = str | Path | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a conversion, by arguments and environment, read and checked.

    `keep`, `lower` and `io` are patterns as `convert` takes them.
    """

    to: DType
    lists: OpLists
    level: Level
    target: Target
    safety: Safety
    keep: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    io: str | Sequence[str] | None = None
    gray_follows_allow: bool | None = None
    log_path: Path | None = None
    fuse: Fuse = Fuse.NONE
    opset: Opset | None = None
    placement: Placement = AUTO

    @classmethod
    def of(
        cls,
        *,
        to: str | DType | Policy = "float16",
        lists: Sequence[ListSource] | ListSource = (),
        level: str | Level | None = None,
        target: str | Target = "ort-cuda",
        safety: str | Safety = "default",
        keep: Sequence[str] = (),
        lower: Sequence[str] = (),
        io: str | Sequence[str] | None = None,
        gray_follows_allow: bool | None = None,
        fuse: str | Fuse = Fuse.NONE,
        opset: Opset | None = None,
        placement: str | Placement | None = None,
    ) -> Request:
        """The request of `convert`'s arguments; raises as `convert` does."""
        environment = from_environment(os.environ)
        low = low_type(to)
        chosen = level if level is not None else str(environment.get("level", "default"))
        runs_on = target if isinstance(target, Target) else Target.parse(target)
        chosen_safety = safety if isinstance(safety, Safety) else Safety.parse(safety)
        return cls(
            low,
            _lists(low, lists, environment),
            chosen if isinstance(chosen, Level) else Level.parse(chosen),
            runs_on,
            chosen_safety,
            _texts(keep),
            _texts(lower),
            io,
            gray_follows_allow,
            Path(str(environment["log_path"])) if "log_path" in environment else None,
            _for(runs_on, fuse if isinstance(fuse, Fuse) else Fuse.parse(fuse)),
            _opset(opset),
            _placement(placement, chosen_safety),
        )

    @property
    def safe(self) -> bool:
        """Whether this project's rules hold on top of TensorFlow's."""
        return self.safety is Safety.DEFAULT

    @property
    def settings(self) -> dict[str, str]:
        """Level, target and safety as they are spelled; fuse, opset and placement too, if they are not the usual."""
        chosen = {"fuse": self.fuse.value, "opset": str(self.opset or ""), "placement": self.placement.spelling}
        told = {"level": self.level.value, "target": self.target.value, "safety": self.safety.value}
        usual = {"fuse": Fuse.BASIC.value, "opset": "", "placement": _placement(None, self.safety).spelling}
        return told | {name: spelling for name, spelling in chosen.items() if spelling != usual[name]}


def _placement(given: str | Placement | None, safety: Safety) -> Placement:
    """What is asked for; else "auto", but for TensorFlow's rules alone its way of placing, too."""
    if given is None:
        return AUTO if safety is Safety.DEFAULT else PROPAGATE
    return given if isinstance(given, Placement) else Placement.parse(given)


@dataclass(frozen=True)
class Draft:
    """A model that is read, expanded and looked at for hazards, and what is asked of it, resolved to its ops.

    `source` is the model as given, `view` that of the model that is painted: functions inlined where painting
    gains by it. `clusters` are the groups of ops that compute one thing together, whether or not safety rules hold.
    """

    request: Request
    source: Model
    view: View
    hazards: Hazards
    clusters: tuple[Cluster, ...]
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    io: Mapping[ValueId, DType]
    expansions: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, model: object, request: Request, *, folder: str | Path | None = None) -> Draft:
        """The draft of whatever `Model.load` takes, or of a Model. O(nodes + uses); reads each constant once."""
        source = model if isinstance(model, Model) else Model.load(model, folder=folder)
        plain, expansions = _expanded(source, request)
        keep, lower = overrides(plain, request.keep, request.lower)
        view, fusions = _fused(plain, request, {*keep, *lower})
        found = hazards(view, request.to) if request.safe else Hazards()
        return cls(
            request,
            source,
            view,
            found,
            found.clusters if request.safe else clusters(view),
            followed(keep, plain, view),
            followed(lower, plain, view),
            io_types(view, parse_io(request.io), request.to),
            (*expansions, *fusions),
        )

    def paint(self, pins: Sequence[Pin] = ()) -> Coloring:
        """The colouring, with pins from data on top of the safety rules'. O(nodes + uses).

        What data pins is pinned with its whole cluster, whatever the safety asked for. Placed by minimum cut if that
        is asked for, where it is cheaper.
        """
        coloring = self._paint(pins, self.placing)
        if self.placing is None or not (self.placing.moved or self.request.placement.islands):
            return coloring
        return replace(coloring, findings=(*coloring.findings, self.placing.finding))

    @cached_property
    def placing(self) -> Placing | None:
        """What places by minimum cut; None where nobody asks for it."""
        place = self.request.placement
        if place.roof is None:
            return None
        from amp_rewrite.placement.place import Placing  # late: only who asks for it pays for it

        return Placing.of(self.view, place.roof, self.request.to, islands=place.islands)

    def _paint(self, pins: Sequence[Pin], place: Placing | None = None) -> Coloring:
        request = self.request
        return paint(
            self.view,
            request.lists,
            request.to,
            level=request.level,
            target=request.target,
            pins=(*self.hazards.pins, *pins),
            clusters=self.clusters if pins else self.hazards.clusters,
            norms=self.clusters,
            numbers=self.hazards.numbers,
            keep=self.keep,
            lower=self.lower,
            low_inputs=self.io,
            gray_follows_allow=request.gray_follows_allow,
            shapes_follow=request.safe,
            benign=self.hazards.benign,
            spare_casts=request.safe,
            place=place,
        )

    def plan(self, coloring: Coloring) -> Plan:
        """What has to change for a colouring, as data. O(nodes + uses)."""
        return plan_casts(self.view, coloring, self.io, self.hazards.saturate)


def _expanded(source: Model, request: Request) -> tuple[View, tuple[Finding, ...]]:
    """The view that is painted: functions inlined where painting gains by it, CastLike and added masks spelled out."""
    inlined, local = inline_functions(source, low=bool(request.keep))
    view, moves = _moved(View.of(inlined), request)
    view, standard = inline_schema_functions(view, request.lists, request.to, request.target)
    view, masks = select_masks(spell_out_casts(view)) if request.safe else (spell_out_casts(view), ())
    return view, (*local, *moves, *standard, *masks)


def _moved(view: View, request: Request) -> tuple[View, tuple[Finding, ...]]:
    """The view at the opset that is asked for."""
    if request.opset is None:
        return view, ()
    from amp_rewrite.opset import at_opset

    return at_opset(view, request.opset, request.to, request.target, fusing=request.fuse is not Fuse.NONE)


def _opset(wanted: Opset | None) -> Opset | None:
    if wanted is None:
        return None
    from amp_rewrite.opset import parse_opset  # late: only who asks for it pays for it

    return parse_opset(wanted)


def _fused(view: View, request: Request, named: set[OpId]) -> tuple[View, tuple[Finding, ...]]:
    """The view in standard form, as far as that is asked for and no pattern names the ops."""
    if request.fuse is Fuse.NONE:
        return view, ()
    return canonical(view, request.to, request.target, named, request.fuse)


def _for(target: Target, fuse: Fuse) -> Fuse:
    """What is fused, where the target can run it. PolicyError for operators of a runtime that is not the target's."""
    if fuse is Fuse.CONTRIB and target is not Target.ORT_CUDA:
        raise PolicyError(
            f"fuse 'contrib' makes operators that only onnxruntime has, and the target is {target.value!r}; use target"
            " 'ort-cuda', or fuse 'basic'"
        )
    return fuse


def _texts(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _lists(to: DType, given: Sequence[ListSource] | ListSource, environment: Mapping[str, object]) -> OpLists:
    overlays = [given] if isinstance(given, (str, Path, Mapping)) else list(given)
    if not overlays:
        overlays = list(environment.get("lists", ()))  # type: ignore[call-overload]
    return load_lists(to, overlays, environment_edits(os.environ))
