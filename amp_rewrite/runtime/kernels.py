"""The kernel tables of execution providers by release, and the documented limits of other runtimes."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError

_TABLES = Path(__file__).parent / "_tables"


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered kernel: the versions it serves, and the types it admits for each constrained type variable.

    `last` is None for a registration without an upper bound. Such a kernel serves only version `since`, and not the
    next version of the schema. Types of different variables may be combined freely, so a kernel that needs two
    variables to be both float or both double has two registrations.
    """

    since: int
    last: int | None
    types: Mapping[str, frozenset[str]]

    def serves(self, version: int) -> bool:
        """True if the kernel serves nodes of this since_version."""
        return version == self.since or (self.last is not None and self.since <= version <= self.last)

    def admits(self, types: Mapping[str, str]) -> bool:
        """True if every constrained variable in `types` has an admitted type."""
        return all(types[name] in allowed for name, allowed in self.types.items() if name in types)


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of an execution provider in one release of the runtime ("onnxruntime-gpu 1.31.1").

    The domain "" is "ai.onnx". Methods take `types`, the ONNX type string of each type variable of the operator's
    schema, such as {"T": "tensor(float16)"}, without variables of absent optional inputs. Operators that the runtime
    expands as functions have no kernel of their own. `opset`, `ir`: the newest opset and IR version that the runtime
    loads; None if unknown. `contrib`: for each operator of com.microsoft, the maximum numbers of inputs and outputs,
    and the attributes; None if unknown.
    """

    runtime: str
    provider: str
    registrations: Mapping[str, tuple[Registration, ...]] = field(repr=False)
    aliases: Mapping[str, Mapping[int, int]] = field(repr=False)
    opset: int | None = None
    ir: int | None = None
    contrib: Mapping[str, Any] | None = field(default=None, repr=False)

    def runs(self, domain: str, op_type: str, since_version: int, types: Mapping[str, str]) -> bool:
        """True if a registered kernel serves the version and admits all of `types` together."""
        return any(kernel.admits(types) for kernel in self._serving(domain, op_type, since_version))

    def covers(self, domain: str) -> bool:
        """True if the table has operators of a domain; kernels for other domains come from custom-op libraries."""
        return any(key.startswith(_key(domain, "")) for key in self.registrations)

    def has(self, domain: str, op_type: str, since_version: int) -> bool:
        """True if a kernel serves the version, for any types."""
        return next(self._serving(domain, op_type, since_version), None) is not None

    def refusal(self, domain: str, op_type: str, since_version: int, types: Mapping[str, str]) -> str | None:
        """Return why no kernel runs the operator, as a clause for reports; None if one does."""
        if self.runs(domain, op_type, since_version, types):
            return None
        name = op_type if domain in ("", "ai.onnx") else f"{domain}.{op_type}"
        if _key(domain, op_type) not in self.registrations:
            return f"no {self.provider} kernel for {name}"
        if not self.has(domain, op_type, since_version):
            return f"no {self.provider} kernel for {name} of version {since_version}"
        assigned = ", ".join(f"{variable}={types[variable]}" for variable in sorted(types))
        return f"no {self.provider} kernel for {name} with {assigned}"

    def contrib_refusal(self, op_type: str, inputs: int, outputs: int, attributes: Collection[str]) -> str | None:
        """Return why the runtime rejects a node of com.microsoft; None if no reason is known."""
        if self.contrib is None:
            return None
        if op_type not in self.contrib:
            return f"{self.runtime} does not have com.microsoft.{op_type}"
        *limits, names = self.contrib[op_type]
        for count, limit, ports in zip((inputs, outputs), limits, ("inputs", "outputs"), strict=True):
            if isinstance(limit, int) and count > limit:
                return f"{op_type} in {self.runtime} has at most {limit} {ports}, not {count}"
        unknown = next((name for name in attributes if name not in names), None)
        return None if unknown is None else f"{op_type} in {self.runtime} does not have the attribute {unknown!r}"

    def _serving(self, domain: str, op_type: str, since_version: int) -> Iterator[Registration]:
        key = _key(domain, op_type)
        version = self.aliases.get(key, {}).get(since_version, since_version)
        return (kernel for kernel in self.registrations.get(key, ()) if kernel.serves(version))


@functools.cache
def load_kernels(release: str = "") -> Kernels:
    """Load the kernel table of the CUDA provider for one of `releases()`, by default the newest."""
    release = release or releases()[-1]
    table = load_table("cuda_kernels")
    # The table is for the newest release; older ones are stored as changes, each from the next newer release.
    if release != table["runtime"].rpartition(" ")[2]:
        history = load_table("cuda_history")
        table = {**table, "sets": history["sets"]}
        for older, change in history["releases"].items():
            table = patch(table, change)
            if older == release:
                break
    return kernels_of(table)


@functools.cache
def load_webgpu_kernels() -> Kernels:
    """Load the kernel table of the WebGPU provider, measured by `python -m suites.webgpu table`."""
    return kernels_of(load_table("webgpu_kernels"), "webgpu")


def releases() -> tuple[str, ...]:
    """Return the releases of onnxruntime-gpu with a table, oldest first."""
    newest = load_table("cuda_kernels")["runtime"].rpartition(" ")[2]
    return tuple(sorted((newest, *load_table("cuda_history")["releases"]), key=release_number))


def kernels_of(table: Mapping[str, Any], provider: str = "cuda") -> Kernels:
    """Return the kernels of a table in the format of the files (docs/reference/targets.md)."""
    sets = [frozenset(allowed) for allowed in table["sets"]]
    registrations = {
        key: tuple(
            Registration(since, last, {name: sets[index] for name, index in types.items()})
            for since, last, types in rows
        )
        for key, rows in table["kernels"].items()
    }
    aliases = {key: dict(pairs) for key, pairs in table["aliases"].items()}
    limits = (table.get("opset"), table.get("ir"))
    return Kernels(table["runtime"], provider, registrations, aliases, *limits, contrib=table.get("contrib"))


@functools.cache
def load_table(name: str) -> Mapping[str, Any]:
    """Load a data file of this package: kernels, limits or faults of runtimes."""
    table: Mapping[str, Any] = json.loads((_TABLES / f"{name}.json").read_text(encoding="utf-8"))
    return table


def patch(table: Mapping[str, Any], change: Mapping[str, Any]) -> Mapping[str, Any]:
    """Apply the changes from a release to the previous one; null marks an entry missing from the previous one."""
    parts = {}
    for part in ("kernels", "aliases", "contrib"):
        merged = {**table[part], **change.get(part, {})}
        parts[part] = {key: entry for key, entry in merged.items() if entry is not None}
    return {**table, **{name: change[name] for name in ("runtime", "opset", "ir")}, **parts}


def _key(domain: str, op_type: str) -> str:
    return f"{domain or 'ai.onnx'}::{op_type}"


def release_number(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release: (1, 22, 0) for "1.22.0", (1, 32) for "1.32.dev3"; () without any."""
    return tuple(map(int, takewhile(str.isdecimal, release.split("."))))


def known_release(release: str) -> str:
    """Return the release of the table to use for a release: the newest patch for "1.22", the newest of all for "".

    A release without a table gets the latest earlier one, so no kernel is assumed that it may not have. PolicyError for
    a release before the oldest table, and for text that is not a release.
    """
    tables = releases()
    if not release:
        return tables[-1]
    number = release_number(release)
    if not number:
        raise PolicyError(f"{release!r} is not a release of onnxruntime; use one of {', '.join(tables)}")
    patches = [name for name in tables if release_number(name)[: len(number)] == number]
    usable = patches or [name for name in tables if release_number(name) <= number]
    if not usable:
        raise PolicyError(f"there is no kernel table for onnxruntime-gpu {release}; use release {tables[0]} or later")
    return usable[-1]


@functools.cache
def installed_release() -> str:
    """Return the release of the installed onnxruntime-gpu or onnxruntime; "" if none has a table."""
    for package in ("onnxruntime-gpu", "onnxruntime"):
        try:
            found = metadata.version(package)
            known_release(found)
        except (metadata.PackageNotFoundError, PolicyError):
            continue
        return found
    return ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a runtime.

    `runtime`: its name in messages. `low`: the low types that it computes in. `opset`: the newest supported ai.onnx
    opset; None if not documented. `absent`: unsupported ai.onnx operators. `without`: operators that are supported in
    float32, but not in a low type. `source`: the page that documents the limits.
    """

    runtime: str
    low: frozenset[DType]
    opset: int | None
    source: str
    absent: frozenset[str] = frozenset()
    without: Mapping[DType, frozenset[str]] = field(default_factory=dict)

    def refusal(self, op_type: str, dtype: DType) -> str | None:
        """Return why the runtime cannot run an ai.onnx operator in a low type; None if no reason is known."""
        if op_type in self.absent:
            return f"{self.runtime} does not support {op_type}"
        if op_type in self.without.get(dtype, ()):
            return f"{self.runtime} does not support {op_type} in {dtype.spelling}"
        return None


def _read(row: Mapping[str, Any]) -> Limits:
    return Limits(
        row["runtime"],
        frozenset(map(DType.parse, row["low"])),
        row["opset"],
        row["source"],
        frozenset(row.get("absent", ())),
        {DType.parse(low): frozenset(operators) for low, operators in row.get("without", {}).items()},
    )


LIMITS: Mapping[str, Limits] = {name: _read(row) for name, row in load_table("limits")["limits"].items()}
"""The limits by the name of the target."""
