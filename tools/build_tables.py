"""Rebuild `amp_rewrite/runtime/_tables` from the installed onnxruntime wheel; see docs/reference/targets.md.

python tools/build_tables.py schemas          writes contrib_schemas.json and contrib_defaults.json
python tools/build_tables.py kernels FOLDER   writes cuda_kernels.json and cuda_history.json from dumps of releases

`tools/dump_releases.py` writes the dumps.
"""

from __future__ import annotations

import argparse
import datetime
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from registry import table_of

from amp_rewrite.runtime.kernels import patch, release_number

TABLES = Path(__file__).resolve().parent.parent / "amp_rewrite" / "runtime" / "_tables"
SCHEMA = 1
SOURCE = "onnxruntime get_all_opkernel_def and get_all_operator_schema"

Json = dict[str, Any]


def main() -> None:
    """Run a step: schemas or kernels."""
    parser = argparse.ArgumentParser(description="rebuild amp_rewrite/runtime/_tables from the onnxruntime wheel")
    parser.add_argument("--out", type=Path, default=TABLES, help="directory of the tables")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date for the header")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("schemas")
    steps.add_parser("kernels").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.step == "schemas":
        table = contrib_table(args.date)
        (args.out / "contrib_schemas.json").write_text(spell(table, "ops"))
        (args.out / "contrib_defaults.json").write_text(spell({**table, "ops": defaults(table["ops"])}, "ops"))
    else:
        newest, *older = tables(args.folder)
        head = {"schema": SCHEMA, "provider": "CUDAExecutionProvider", "source": SOURCE, "date": args.date}
        (args.out / "cuda_kernels.json").write_text(spell({**head, **newest}, "kernels"))
        sets, changes = history(newest, older)
        (args.out / "cuda_history.json").write_text(spell({**head, "sets": sets, "releases": changes}, "releases"))


def spell(table: Json, body: str) -> str:
    """Return the table as JSON with one line per header field and entry of `body`, for readable diffs."""
    head = [f"{json.dumps(key)}: {_compact(value)}" for key, value in table.items() if key != body]
    rows = [f"{json.dumps(key)}:{_compact(value)}" for key, value in table[body].items()]
    return "{\n" + ",\n".join(head) + f',\n"{body}": {{\n' + ",\n".join(rows) + "\n}}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def wheel() -> str:
    """Return the installed wheel, such as "onnxruntime-gpu 1.31.1"."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise SystemExit("no onnxruntime wheel is installed; install onnxruntime-gpu")


def normal_domain(domain: str) -> str:
    """Return `domain`, with the default domain spelled out."""
    return domain or "ai.onnx"


def contrib_table(date: str) -> Json:
    """Return the operators registered only by onnxruntime: com.microsoft, and a few in ai.onnx."""
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
    """Return all operator schemas of the installed wheel."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return list(state.get_all_operator_schema())


def schema_entry(schema: Any) -> Json:
    """Return an operator in the table's format."""
    types = {c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints}
    return {
        "since": schema.since_version,
        "inputs": [formal(p) for p in schema.inputs],
        "outputs": [formal(p) for p in schema.outputs],
        "types": dict(sorted(types.items())),
        "attributes": {name: schema.attributes[name].type.name for name in sorted(schema.attributes)},
    }


def defaults(ops: Json) -> Json:
    """Return the default attributes of the operators in the table, if they have any."""
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
    """Return [name, type variable or type, option], and the homogeneity of a variadic parameter."""
    row = [parameter.name, parameter.typeStr, parameter.option.name]
    return [*row, parameter.isHomogeneous] if row[2] == "Variadic" else row


def tables(folder: Path) -> list[Json]:
    """Return the tables of the dumps in a folder, newest first."""
    dumps = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    dumps.sort(key=lambda dump: release_number(release_of(dump)), reverse=True)
    if not dumps:
        raise SystemExit(f"{folder} has no dumps; run tools/dump_releases.py to write them")
    return [table_of(dump) for dump in dumps]


def release_of(table: Json) -> str:
    """Return the release in a text such as "onnxruntime-gpu 1.31.1"."""
    return str(table["runtime"]).rpartition(" ")[2]


def history(newest: Json, older: list[Json]) -> tuple[list[list[str]], Json]:
    """Return the changes from each table to the next older one, and the sets of types they refer to by index."""
    sets = [*newest["sets"]]
    numbers = {tuple(allowed): index for index, allowed in enumerate(sets)}
    changes: Json = {}
    now = newest
    for table in older:
        for allowed in table["sets"]:
            if numbers.setdefault(tuple(allowed), len(sets)) == len(sets):
                sets.append(allowed)
        indices = [numbers[tuple(allowed)] for allowed in table["sets"]]
        kernels = {
            key: [[since, last, {name: indices[i] for name, i in types.items()}] for since, last, types in rows]
            for key, rows in table["kernels"].items()
        }
        table = {**table, "kernels": kernels}
        change: Json = {name: table[name] for name in ("runtime", "opset", "ir")}
        for part in ("kernels", "aliases", "contrib"):
            change[part] = difference(now[part], table[part])
        if patch(now, change) | {"sets": None} != table | {"sets": None}:
            raise SystemExit(f"the changes do not reproduce the table of {table['runtime']}")
        changes[release_of(table)] = change
        now = table
    return sets, changes


def difference(newer: Json, older: Json) -> Json:
    """Return the older table's entries different from the newer one, with null for missing entries."""
    gone = {key: None for key in newer if key not in older}
    return dict(sorted(({key: entry for key, entry in older.items() if newer.get(key) != entry} | gone).items()))


if __name__ == "__main__":
    main()
