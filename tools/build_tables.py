"""Rebuild `amp_rewrite/runtime/_tables` from the installed onnxruntime wheel; see docs/reference/tables.md.

python tools/build_tables.py schemas                  writes contrib_schemas.json and contrib_defaults.json
python tools/build_tables.py dump REGISTRY.json       needs the CUDA provider library to load
python tools/build_tables.py kernels REGISTRY.json    writes cuda_kernels.json from a dump
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parent.parent / "amp_rewrite" / "runtime" / "_tables"
SCHEMA = 1

Json = dict[str, Any]


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(description="rebuild amp_rewrite/runtime/_tables from the onnxruntime wheel")
    parser.add_argument("--out", type=Path, default=TABLES, help="directory of the tables")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date for the header")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("schemas")
    for step in ("dump", "kernels"):
        steps.add_parser(step).add_argument("registry", type=Path)
    args = parser.parse_args()
    if args.step == "dump":
        from amp_rewrite.runtime.runner import kernel_registry

        dump = {"runtime": wheel(), "kernels": kernel_registry()}
        args.registry.write_text(json.dumps(dump, indent=0) + "\n")
    elif args.step == "schemas":
        table = contrib_table(args.date)
        (args.out / "contrib_schemas.json").write_text(spell(table, "ops"))
        (args.out / "contrib_defaults.json").write_text(spell({**table, "ops": defaults(table["ops"])}, "ops"))
    else:
        dump = json.loads(args.registry.read_text())
        if dump["runtime"] != wheel():
            raise SystemExit(f"{args.registry} is a dump of {dump['runtime']}, not of {wheel()}; dump again")
        table = kernel_table(dump["kernels"], args.date)
        (args.out / "cuda_kernels.json").write_text(spell(table, "kernels"))


def spell(table: Json, body: str) -> str:
    """The table as JSON, one line per header field and per entry of `body`: small, and a diff can be read."""
    head = [f"{json.dumps(key)}: {_compact(value)}" for key, value in table.items() if key != body]
    rows = [f"{json.dumps(key)}:{_compact(value)}" for key, value in table[body].items()]
    return "{\n" + ",\n".join(head) + f',\n"{body}": {{\n' + ",\n".join(rows) + "\n}}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def wheel() -> str:
    """The installed wheel, as "onnxruntime-gpu 1.31.1"."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise SystemExit("no onnxruntime wheel is installed; install onnxruntime-gpu")


def normal_domain(domain: str) -> str:
    """`domain` with the default domain spelled out."""
    return domain or "ai.onnx"


def contrib_table(date: str) -> Json:
    """The operators that onnxruntime registers and onnx does not: com.microsoft, and strays in ai.onnx."""
    import onnx.defs

    known = {(normal_domain(s.domain), s.name, s.since_version) for s in onnx.defs.get_all_schemas_with_history()}
    ops: Json = {}
    until: dict[str, int] = {}
    for s in sorted(ort_schemas(), key=lambda s: (normal_domain(s.domain), s.name, s.since_version)):
        domain = normal_domain(s.domain)
        if domain not in ("ai.onnx", "com.microsoft") or (domain, s.name, s.since_version) in known:
            continue
        key = f"{domain}::{s.name}"
        if s.deprecated:
            until[key] = s.since_version
        elif key in ops:
            raise SystemExit(f"{key} has two live versions; the table has room for one")
        else:
            ops[key] = schema_entry(s)
    for key, version in until.items():
        ops[key]["deprecated"] = version
    return {"schema": SCHEMA, "source": wheel(), "date": date, "ops": ops}


def ort_schemas() -> list[Any]:
    """Every operator schema of the installed wheel."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return list(state.get_all_operator_schema())


def schema_entry(schema: Any) -> Json:
    """One operator in the table's form."""
    types = {c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints}
    return {
        "since": schema.since_version,
        "inputs": [formal(p) for p in schema.inputs],
        "outputs": [formal(p) for p in schema.outputs],
        "types": dict(sorted(types.items())),
        "attributes": {name: schema.attributes[name].type.name for name in sorted(schema.attributes)},
    }


def defaults(ops: Json) -> Json:
    """The defaults of attributes, for the operators of the table that have some."""
    import onnx

    stated: Json = {}
    for schema in ort_schemas():
        key = f"{normal_domain(schema.domain)}::{schema.name}"
        if key not in ops or schema.deprecated or ops[key]["since"] != schema.since_version:
            continue
        attributes = (
            (n, onnx.AttributeProto.FromString(schema.attributes[n]._default_value)) for n in ops[key]["attributes"]
        )
        plain = {name: _plain(onnx.helper.get_attribute_value(a)) for name, a in attributes if a.type}
        if plain:
            stated[key] = plain
    return dict(sorted(stated.items()))


def _plain(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


def formal(parameter: Any) -> list[Any]:
    """[name, type variable or type, option], and for a variadic parameter whether it is homogeneous."""
    row = [parameter.name, parameter.typeStr, parameter.option.name]
    return [*row, parameter.isHomogeneous] if row[2] == "Variadic" else row


OPEN = 2**31 - 1  # the registry's "no last version"
DOMAINS = ("ai.onnx", "ai.onnx.ml", "com.microsoft")

Product = tuple[frozenset[str], ...]  # for each type variable the types that one kernel admits


def kernel_table(registry: Iterable[Json], date: str) -> Json:
    """The CUDA kernels of a registry dump, their parameters resolved to type variables, equal rows merged."""
    schemas = schemas_by_op()
    rows: dict[tuple[str, int, int, tuple[str, ...]], list[Product]] = {}
    for kernel in registry:
        if kernel["provider"] != "CUDAExecutionProvider" or kernel["domain"] not in DOMAINS:
            continue
        key = f"{kernel['domain']}::{kernel['op']}"
        first, last = kernel["versions"]
        types = resolved(key, first, last, kernel["types"], schemas.get(key, {}))
        names = tuple(sorted(types))
        rows.setdefault((key, first, last, names), []).append(tuple(frozenset(types[n]) for n in names))
    sets: dict[frozenset[str], int] = {}
    kernels: Json = {}
    for (key, first, last, names), products in sorted(rows.items()):
        for product in merged(products):
            indices = [sets.setdefault(allowed, len(sets)) for allowed in product]
            row = [first, None if last == OPEN else last, dict(zip(names, indices, strict=True))]
            kernels.setdefault(key, []).append(row)
    return {
        "schema": SCHEMA,
        "runtime": wheel(),
        "provider": "CUDAExecutionProvider",
        "source": "onnxruntime get_all_opkernel_def",
        "date": date,
        "aliases": aliases(schemas, kernels),
        "sets": [sorted(allowed) for allowed in sets],
        "kernels": kernels,
    }


def schemas_by_op() -> dict[str, dict[int, Any]]:
    """Each operator's schemas in the installed wheel, by since_version."""
    found: dict[str, dict[int, Any]] = {}
    for s in ort_schemas():
        found.setdefault(f"{normal_domain(s.domain)}::{s.name}", {})[s.since_version] = s
    return found


def resolved(
    key: str, first: int, last: int, types: Mapping[str, list[str]], schemas: Mapping[int, Any]
) -> Mapping[str, list[str]]:
    """`types` by schema type variable, without the parameters that name a formal of fixed type.

    A kernel parameter is a type variable that some formal uses, or else the name of a formal whose type is
    fixed; this is how the runtime itself looks it up. A fixed type cannot change, so it must be admitted and
    is then no constraint. Anything else ends the build: an unresolved name is a table that lies.
    """
    served = [s for v, s in schemas.items() if v == first or (last != OPEN and first <= v <= last)]
    fixed: set[str] = set()
    for schema in served:
        variables = {c.type_param_str for c in schema.type_constraints}
        formals = [*schema.inputs, *schema.outputs]
        used = {f.typeStr for f in formals} & variables
        plain = {f.name: f.typeStr for f in formals if f.typeStr not in variables}
        for name, allowed in types.items():
            if name not in used and plain.get(name) not in allowed:
                raise SystemExit(f"{key} {first}..{last}: parameter {name!r} is not in schema {schema.since_version}")
            if name not in used:
                fixed.add(name)
    if not served:
        raise SystemExit(f"{key} {first}..{last}: no schema of the wheel has a version in that range")
    return {name: allowed for name, allowed in types.items() if name not in fixed}


def merged(products: Iterable[Product]) -> list[Product]:
    """Fewer products with exactly the same union: those that differ in one place only are joined."""
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


def aliases(schemas: Mapping[str, Mapping[int, Any]], kernels: Iterable[str]) -> dict[str, list[list[int]]]:
    """[version, the runtime's version] of the schema versions that onnx has and the runtime does not.

    Only up to the newest ai.onnx opset of the runtime: it refuses a model of a later one.
    """
    import onnx.defs

    newest = max(v for key, versions in schemas.items() if key.startswith("ai.onnx::") for v in versions)
    found: dict[str, list[list[int]]] = {}
    for s in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: (s.name, s.since_version)):
        key, version = f"{normal_domain(s.domain)}::{s.name}", s.since_version
        if s.domain == "" and key in kernels and version <= newest and version not in schemas[key]:
            found.setdefault(key, []).append([version, max(v for v in schemas[key] if v < version)])
    return found


if __name__ == "__main__":
    main()
