"""Build kernel tables from the registry dumps of tools/dump_releases.py.

A dump lists onnxruntime's kernels, one for each compiled combination of types, and its operators' schemas. A table uses
type variables instead of parameter names, and combines many kernels into one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_rewrite.ir.schema import contrib_schemas
from amp_rewrite.runtime.runner import small_model

OPEN = 2**31 - 1
"""The last version of a registration without an upper bound."""
DOMAINS = ("ai.onnx", "ai.onnx.ml", "com.microsoft")
CUDA = "CUDAExecutionProvider"

Json = dict[str, Any]
Product = tuple[frozenset[str], ...]
"""A kernel's accepted types for each type variable."""


@dataclass(frozen=True, slots=True)
class Formals:
    """The types of an operator's inputs and outputs by name, and its type variables, at one version."""

    types: Mapping[str, str]
    variables: frozenset[str]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Formals:
        """Return the formals of a schema in JSON."""
        types = {name: spelling for name, spelling, *_ in (*row["inputs"], *row["outputs"])}
        return cls(types, frozenset(row["types"]))


Schemas = Mapping[str, Mapping[int, Formals]]
"""The versions of each operator by "domain::Op"."""


def table_of(dump: Mapping[str, Any], provider: str = CUDA) -> Json:
    """Return the kernel table of a provider in a dump (docs/reference/targets.md)."""
    schemas = _schemas(dump.get("schemas") or ())
    rows: dict[tuple[str, int, int, tuple[str, ...]], list[Product]] = {}
    for kernel in dump["kernels"]:
        if kernel["provider"] != provider or kernel["domain"] not in DOMAINS:
            continue
        key = f"{kernel['domain']}::{kernel['op']}"
        first, last = kernel["versions"]
        types = resolved(key, first, last, kernel["types"], schemas)
        names = tuple(sorted(types))
        rows.setdefault((key, first, last, names), []).append(tuple(frozenset(types[n]) for n in names))
    sets: dict[frozenset[str], int] = {}
    kernels: Json = {}
    for (key, first, last, names), products in sorted(rows.items()):
        for product in merged(products):
            indices = [sets.setdefault(allowed, len(sets)) for allowed in product]
            row = [first, None if last == OPEN else last, dict(zip(names, indices, strict=True))]
            kernels.setdefault(key, []).append(row)
    if not kernels:
        raise SystemExit(
            f"{dump['runtime']} has no kernels for {provider}; dump the registry of an onnxruntime that has them"
        )
    return {
        "runtime": dump["runtime"],
        "opset": dump.get("opset"),
        "ir": dump.get("ir"),
        "aliases": aliases(schemas, kernels, dump.get("opset")),
        "contrib": contrib_rows(dump.get("schemas") or ()),
        "sets": [sorted(allowed) for allowed in sets],
        "kernels": kernels,
    }


def _schemas(rows: Iterable[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of a dump, or else the schemas of onnx and of onnxruntime's own operators."""
    found: dict[str, dict[int, Formals]] = {}
    for row in rows:
        found.setdefault(f"{row['domain']}::{row['op']}", {})[row["since"]] = Formals.of(row)
    return found or dict(_known_schemas())


def _known_schemas() -> Iterator[tuple[str, dict[int, Formals]]]:
    import onnx.defs

    found: dict[str, dict[int, Formals]] = {}
    for s in onnx.defs.get_all_schemas_with_history():
        types = {formal.name: formal.type_str for formal in (*s.inputs, *s.outputs)}
        variables = frozenset(c.type_param_str for c in s.type_constraints)
        found.setdefault(f"{s.domain or 'ai.onnx'}::{s.name}", {})[s.since_version] = Formals(types, variables)
    for key, row in contrib_schemas().items():
        found.setdefault(key, {})[row["since"]] = Formals.of(row)
    yield from found.items()


def resolved(
    key: str, first: int, last: int, types: Mapping[str, list[str]], schemas: Schemas
) -> Mapping[str, list[str]]:
    """Return `types` by schema type variable, without the parameters of formals with a fixed type.

    Like the runtime, this takes a kernel parameter as a type variable used by a formal, or else as the name of a formal
    with a fixed type. The kernel must accept a fixed type, which is then not a constraint. Any other name raises
    ValueError, since it would make the table wrong.
    """
    served = {v: s for v, s in schemas.get(key, {}).items() if v == first or (last != OPEN and first <= v <= last)}
    if not served:
        raise ValueError(f"{key} {first}..{last}: no schema has a version in that range")
    fixed: set[str] = set()
    for version, schema in served.items():
        used = set(schema.types.values()) & schema.variables
        plain = {name: spelling for name, spelling in schema.types.items() if spelling not in schema.variables}
        for name, allowed in types.items():
            if name not in used and plain.get(name) not in allowed:
                raise ValueError(f"{key} {first}..{last}: parameter {name!r} is not in schema {version}")
            if name not in used:
                fixed.add(name)
    return {name: allowed for name, allowed in types.items() if name not in fixed}


def merged(products: Iterable[Product]) -> list[Product]:
    """Merge products with only one difference, without changing their union."""
    rows = sorted(set(products), key=lambda row: [sorted(place) for place in row])
    width = len(rows[0])
    before = 0
    while len(rows) != before:
        before = len(rows)
        for place in range(width):
            joined: dict[Product, frozenset[str]] = {}
            for row in rows:
                rest = row[:place] + row[place + 1 :]
                joined[rest] = joined.get(rest, frozenset()) | row[place]
            rows = [(*rest[:place], union, *rest[place:]) for rest, union in joined.items()]
    return rows


def aliases(schemas: Schemas, kernels: Iterable[str], opset: int | None) -> dict[str, list[list[int]]]:
    """Return [version, the runtime's version] for each onnx schema version missing from the runtime.

    This stops at the runtime's newest ai.onnx opset, since it rejects models with a later one.
    """
    import onnx.defs

    newest = opset or max(v for key, versions in schemas.items() if key.startswith("ai.onnx::") for v in versions)
    found: dict[str, list[list[int]]] = {}
    for s in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: (s.name, s.since_version)):
        key, version = f"ai.onnx::{s.name}", s.since_version
        known = s.domain == "" and not s.deprecated and key in kernels
        if known and version <= newest and version not in schemas[key]:
            older = [v for v in schemas[key] if v < version]
            if older:
                found.setdefault(key, []).append([version, max(older)])
    return found


def contrib_rows(schemas: Sequence[Mapping[str, Any]]) -> Json | None:
    """Return [inputs, outputs, attributes] of each operator of com.microsoft; None for a dump without schemas."""
    rows = {s["op"]: s for s in sorted(schemas, key=lambda s: s["since"]) if s["domain"] == "com.microsoft"}
    if not schemas:
        return None
    return {op: [_most(s["inputs"]), _most(s["outputs"]), sorted(s["attributes"])] for op, s in sorted(rows.items())}


def _most(formals: Sequence[Sequence[Any]]) -> int | None:
    """Return the maximum number of inputs or outputs; None if unlimited."""
    return None if formals and formals[-1][2] == "Variadic" else len(formals)


def schema_row(schema: Any) -> dict[str, Any]:
    """Return an operator's schema as JSON: formals with their types, and type variables with their allowed types."""
    return {
        "domain": schema.domain or "ai.onnx",
        "op": schema.name,
        "since": schema.since_version,
        "inputs": [[formal.name, formal.typeStr, formal.option.name] for formal in schema.inputs],
        "outputs": [[formal.name, formal.typeStr, formal.option.name] for formal in schema.outputs],
        "types": {c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints},
        "attributes": sorted(schema.attributes),
    }


def kernel_registry() -> Json:
    """Return the kernels, schemas and limits of this onnxruntime as JSON (docs/reference/targets.md).

    The process crashes with a segmentation fault if the CUDA or the TensorRT library cannot be loaded.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels = [
        {
            "provider": k.provider,
            "domain": k.domain or "ai.onnx",
            "op": k.op_name,
            "versions": list(k.version_range),
            "types": {name: list(allowed) for name, allowed in k.type_constraints.items()},
        }
        for k in state.get_all_opkernel_def()
    ]
    schemas = [schema_row(s) for s in state.get_all_operator_schema() if not s.deprecated]
    return {
        "opset": _limit(r"is till opset (\d+)", opset=10_000),
        "ir": _limit(r"max supported IR version: (\d+)", ir=10_000),
        "kernels": kernels,
        "schemas": schemas,
    }


def _limit(words: str, opset: int = 1, ir: int = 3) -> int | None:
    """Return the limit in onnxruntime's error about a model beyond it; None without an error."""
    import onnxruntime

    model = small_model()
    model.opset_import[0].version, model.ir_version = opset, ir
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - classes of onnxruntime's extension
        found = re.search(words, str(error))
        return int(found[1]) if found else None
    return None
