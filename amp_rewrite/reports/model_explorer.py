"""Overlays for Model Explorer: node data that color the nodes of an ONNX file by type, by rule or by share of error.

A file of node data is one layer there: `{graph id: {"name": …, "results": {node id: {"value": …, "bgColor": …}}}}`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import fsum
from typing import NamedTuple

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import Strength
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ReportError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import bodies, clone
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.view import View
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.match import match
from amp_rewrite.reports.measurements import LocatedErrors, NamedOp
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.reports.rows import Row
from amp_rewrite.rewrite.passes.inline import inlined

_NAMELESS = "node"
_NO_GRAPH_NAME = "<main>"


class Place(NamedTuple):
    """A node of a file and where Model Explorer shows it: the ids of its graph and of its node there."""

    node: NodeProto
    graph: str
    id: str


class _Named(NamedTuple):
    """A node, its name, and its bodies by attribute."""

    node: NodeProto
    name: str
    bodies: Sequence[tuple[str, Sequence[_Named]]]


def places(proto: ModelProto) -> Iterator[Place]:
    """Yield the nodes in Model Explorer, in the order of the file, those of local functions last. O(nodes)."""
    main = proto.graph.name if proto.graph.HasField("name") else _NO_GRAPH_NAME
    yield from _shown(_named(proto.graph, Counter()), main)
    for function in proto.functions:
        graph = function_graph(function.domain, function.name, function.overload)
        yield from (Place(node, graph, name) for node, name, _ in _named(function, Counter()))


def function_graph(domain: str, name: str, overload: str = "") -> str:
    """Return the id of a local function's graph."""
    return f"[function]{normal_domain(domain)}::{name}" + (f"::{overload}" if overload else "")


def _named(graph: GraphProto | FunctionProto, counter: Counter[str]) -> Sequence[_Named]:
    """Return the nodes of a graph with names that are unique in it; the graph and its bodies share a counter."""
    used: set[str] = set()
    named: list[_Named] = []
    for node in graph.node:
        name = wished = node.name or _NAMELESS
        while name in used:
            counter[wished] += 1
            name = f"{wished}_{counter[wished]}"
        used.add(name)
        named.append(_Named(node, name, [(attribute, _named(body, counter)) for attribute, body in bodies(node)]))
    return named


def _shown(nodes: Sequence[_Named], graph: str, before: str = "", *, main: bool = True) -> Iterator[Place]:
    """Yield the nodes of a graph, each with those of its branches and bodies; `before`: the path of their branch."""
    for node, name, inside in nodes:
        own = before + name
        yield Place(node, graph, own)
        branches = node.op_type == "If" and not normal_domain(node.domain)
        for attribute, body in inside:
            if branches:
                yield from _shown(body, graph, f"{own}/{attribute}/", main=main)
            elif main:
                yield from _shown(body, f"{own}/{attribute}", main=False)


TYPES = {
    "float16": "#58c1f5",
    "bfloat16": "#4fc9a4",
    "float32": "#f2a65a",
    "float64": "#d9772b",
    "bool": "#e3e6ea",
    "string": "#efe9d5",
    "int64": "#ccd2d9",
    "int32": "#b9c2cc",
    "int8": "#d3c4e8",
    "uint8": "#c3b1e1",
}
"""Colors of the usual element types; `_type_color` has one for each of the others."""
STRENGTHS = {
    Strength.SPREAD: "#cfe3f5",
    Strength.LIST: "#8fbbe8",
    Strength.GROUP: "#d9c9ee",
    Strength.PIN: "#f7b26a",
    Strength.SAFETY: "#f0897f",
    Strength.USER: "#9ad48b",
    Strength.GATE: "#c9a26b",
}
"""Colors of rules, by the tier of their reason."""
INSERTED = "inserted"
"""Word for a node that a conversion adds."""
_CAST = "#c79bf2"
_SEVERAL = "#b7bec6"
_OVERFLOWS = "#9a1f4b"
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e0524a"}]
_TEXT_LAYER = {
    "showExpandedSummaryOnGroupNode": True,
    "hideInAggregatedStatsTable": True,
    "hideInChildrenStatsTable": True,
}
"""Show how often each value occurs in a folded group of nodes; texts have no sum to show instead."""
_TAG = "amp_rewrite.place"

Result = dict[str, object]
_Results = dict[str, dict[str, Result]]


@gc_paused()
def overlay(
    model: Model, layer: str = "type", *, report: Report | None = None, errors: LocatedErrors | None = None
) -> str:
    """Return the node data of one layer for a file, as JSON. Ends with a newline. O(nodes), nearly.

    `report`: of the conversion, for the layer "rule". `errors`: for the layer "error". ReportError if a layer lacks
    them, or they are of another model; ModelError for a model that cannot run.
    """
    shown, view, numbers = _indexed(model)
    name = model.path.name if model.path else view.model.proto.graph.name
    values: Sequence[Result | None]
    if layer == "error":
        values = _errors(name, [NamedOp(op.name, op.kind) for op in view.ops], errors)
    else:
        inventory = report_of(view, name=name)
        rules = None if report is None else _matched(inventory, view, report)
        values = _values(inventory, layer, rules, errors)
    results = _placed(shown, numbers, values)
    graphs = (f" {json.dumps(graph)}: {{\n{_graph_data(layer, nodes)}\n }}" for graph, nodes in results.items())
    return "{\n" + ",\n".join(graphs) + "\n}\n"


def _indexed(model: Model) -> tuple[Sequence[Place], View, Sequence[int | None]]:
    """Return the nodes that are shown, the index of the model, and the number of the shown node of each of its ops.

    Inlining copies the nodes of local functions, which carry their number through it as metadata.
    """
    if not model.proto.functions:
        shown, view = list(places(model.proto)), View.of(model)
        known = {id(place.node): number for number, place in enumerate(shown)}  # the file's own nodes, held by `shown`
        return shown, view, [known.get(id(op.node)) for op in view.ops]
    shown = list(places(proto := clone(model.proto)))
    for number, place in enumerate(shown):
        place.node.metadata_props.add(key=_TAG, value=str(number))
    view = View.of(inlined(replace(model, proto=proto)))
    tags = (next((entry.value for entry in op.node.metadata_props if entry.key == _TAG), None) for op in view.ops)
    return shown, view, [None if tag is None else int(tag) for tag in tags]


def overlay_of_report(report: Report, layer: str = "type", *, errors: LocatedErrors | None = None) -> str:
    """Return the node data of one layer for the open graph, by the names in a report alone.

    A report does not hold the nodes of its file: inserted Casts, nodes without names and those in bodies are left out.
    """
    values = _values(report, layer, None if report.inventory else [row.rule for row in report.rows], errors)
    results: dict[str, Result] = {}
    for row, value in zip(report.rows, values, strict=True):
        if row.named and not row.scope and value is not None:
            results.setdefault(row.name, value)  # a second node of that name has another id
    return "{\n" + _graph_data(layer, results) + "\n}\n"


def _values(
    report: Report, layer: str, rules: Sequence[str | None] | None, errors: LocatedErrors | None
) -> Sequence[Result | None]:
    """Return the value of each row in a layer; None for a row without one."""
    if layer == "rule":
        if rules is None:
            advice = "give the report of its conversion with --reasons"
            raise ReportError(f"{report.model.name}: holds no rules, because a model does not state them; {advice}")
        return [_rule(rule) if rule else None for rule in rules]
    if layer == "error":
        return _errors(report.model.name, report.rows, errors)
    return [{"value": row.dtype, "bgColor": _type_color(row.dtype)} for row in report.rows]


def _placed(shown: Sequence[Place], numbers: Sequence[int | None], values: Sequence[Result | None]) -> _Results:
    """Return the values of ops by graph and node; a node of a local function has those of all its calls."""
    by_node: dict[int, list[Result]] = {}
    for number, value in zip(numbers, values, strict=True):
        if number is not None and value is not None:
            by_node.setdefault(number, []).append(value)
    results: _Results = {}
    for number, place in enumerate(shown):
        if number in by_node:
            results.setdefault(place.graph, {})[place.id] = _merged(by_node[number])
    for place in reversed(shown):  # functions stand last, and calls of functions inside them first need theirs
        called = function_graph(place.node.domain, place.node.op_type, place.node.overload)
        if called in results and place.id not in results.get(place.graph, {}):
            results.setdefault(place.graph, {})[place.id] = _merged(list(results[called].values()))
    return results


def _merged(values: Sequence[Result]) -> Result:
    """Return one value for several: their sum for shares of error, otherwise each of them once."""
    if len(values) == 1:
        return values[0]
    if all(isinstance(value["value"], float) for value in values):
        return {"value": fsum(float(str(value["value"])) for value in values)}
    texts = sorted({part for value in values for part in str(value["value"]).split(", ")})
    color = values[0].get("bgColor") if len(texts) == 1 else _SEVERAL
    return {"value": ", ".join(texts), "bgColor": color}


def _graph_data(layer: str, nodes: dict[str, Result]) -> str:
    lines = ",\n".join(f"   {json.dumps(node)}: {json.dumps(value)}" for node, value in nodes.items())
    looks = {"gradient": _GRADIENT} if layer == "error" else _TEXT_LAYER
    stated = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in looks.items())
    return f'  "name": {json.dumps(layer)},\n{stated}  "results": {{\n{lines}\n  }}'


# -- layers ------------------------------------------------------------------------------------------------


def _type_color(dtype: str) -> str:
    """Return the color of an element type; one of the rarer types has a gray of its own."""
    if dtype in TYPES:
        return TYPES[dtype]
    rare = [known.spelling for known in DType if known.spelling not in TYPES]
    shade = 0xA0 + 4 * rare.index(dtype) if dtype in rare else 0xF0
    return f"#{shade:02x}{shade:02x}{shade - 0x10:02x}"


def _rule(rule: str) -> Result:
    known = reasons.reason_of(rule)
    color = STRENGTHS[known.strength] if known else _CAST if rule == INSERTED else _SEVERAL
    words = reasons.words(rule)
    return {"value": rule if words == rule else f"{rule}: {words}", "bgColor": color}


def _matched(inventory: Report, view: View, report: Report) -> list[str | None]:
    """Return the rules of the rows of a file, by the report of the conversion that wrote or read it."""
    if diff(report, inventory).unrelated:
        raise ReportError(
            f"the report is that of {report.model.name}, which has few ops in common with {inventory.model.name}; hand"
            " in the report of this model's conversion"
        )
    rules: list[str | None] = [None] * len(inventory.rows)
    names = {(row.path, row.op): row.rule for row in report.rows if row.named}  # also of Casts, copies and constants
    for at, row in enumerate(inventory.rows):
        rules[at] = names.get((row.path, row.op)) if row.named else None
    pairs = match(report, inventory)
    for theirs, ours in pairs:
        rules[ours] = report.rows[theirs].rule
    inserted = {(cast.scope, cast.value, cast.to) for cast in report.casts if cast.origin == "inserted"}
    for at, (row, op) in enumerate(zip(inventory.rows, view.ops, strict=True)):
        if rules[at] is None and row.op in CASTS:
            ends = (view.value_name(value) for value in (*op.inputs, *op.outputs) if value is not None)
            if any((row.scope, end, row.dtype) in inserted for end in ends):
                rules[at] = INSERTED
    return rules


def _errors(model: str, ops: Sequence[NamedOp | Row], errors: LocatedErrors | None) -> list[Result | None]:
    if errors is None:
        advice = "give the output of `amp-rewrite locate --json` with --errors"
        raise ReportError(f"{model}: holds no errors, because only data show them; {advice}")
    shares = errors.shares(ops, model)
    lost: Result = {"value": "overflows", "bgColor": _OVERFLOWS}
    values: list[Result | None] = [None] * len(ops)
    for at, share in shares.items():
        error = errors.of(ops[at])
        values[at] = lost if error is not None and error.lost else {"value": round(100 * share, 3)}
    return values
