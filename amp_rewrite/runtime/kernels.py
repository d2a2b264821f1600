"""Kernel tables of execution providers: (operator, version) x joint type assignment."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TABLE = Path(__file__).parent / "_tables" / "cuda_kernels.json"


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered kernel: its versions, and the types it admits for each type variable it constrains.

    `last` is None for a registration without an end. Such a kernel serves only version `since`: it does not follow
    the operator to the next version of its schema. The admitted types are a product. So a kernel that is double-only
    or float-only in two variables has two registrations, and does not admit a mix.
    """

    since: int
    last: int | None
    types: Mapping[str, frozenset[str]]

    def serves(self, version: int) -> bool:
        """True if the kernel serves nodes whose schema has this since_version."""
        return version == self.since or (self.last is not None and self.since <= version <= self.last)

    def admits(self, types: Mapping[str, str]) -> bool:
        """True if every constrained variable in `types` has an admitted type."""
        return all(types[name] in allowed for name, allowed in self.types.items() if name in types)


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of one execution provider in one release of the runtime ("onnxruntime-gpu 1.31.1").

    The domain "" is "ai.onnx". `types`: the ONNX type string of each type variable of the operator's schema, such as
    {"T": "tensor(float16)"}, without variables of absent optional inputs. Operators that the runtime expands as
    functions have no kernel of their own.
    """

    runtime: str
    provider: str
    registrations: Mapping[str, tuple[Registration, ...]] = field(repr=False)
    aliases: Mapping[str, Mapping[int, int]] = field(repr=False)

    def runs(self, domain: str, op_type: str, since_version: int, types: Mapping[str, str]) -> bool:
        """True if one registered kernel serves the version and admits all of `types` together."""
        return any(kernel.admits(types) for kernel in self._serving(domain, op_type, since_version))

    def has(self, domain: str, op_type: str, since_version: int) -> bool:
        """True if a kernel serves the version, for any types."""
        return next(self._serving(domain, op_type, since_version), None) is not None

    def refusal(self, domain: str, op_type: str, since_version: int, types: Mapping[str, str]) -> str | None:
        """Return the reason why `runs` is False, as one clause for a report; None if it is True."""
        if self.runs(domain, op_type, since_version, types):
            return None
        name = op_type if domain in ("", "ai.onnx") else f"{domain}.{op_type}"
        if _key(domain, op_type) not in self.registrations:
            return f"no {self.provider} kernel for {name}"
        if not self.has(domain, op_type, since_version):
            return f"no {self.provider} kernel for {name} of version {since_version}"
        spelled = ", ".join(f"{variable}={types[variable]}" for variable in sorted(types))
        return f"no {self.provider} kernel for {name} with {spelled}"

    def _serving(self, domain: str, op_type: str, since_version: int) -> Iterator[Registration]:
        key = _key(domain, op_type)
        version = self.aliases.get(key, {}).get(since_version, since_version)
        return (kernel for kernel in self.registrations.get(key, ()) if kernel.serves(version))


@functools.cache
def load_kernels() -> Kernels:
    """Load the kernel table of the CUDA provider (docs/reference/tables.md)."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    sets = [frozenset(allowed) for allowed in table["sets"]]
    registrations = {
        key: tuple(
            Registration(since, last, {name: sets[index] for name, index in types.items()})
            for since, last, types in rows
        )
        for key, rows in table["kernels"].items()
    }
    aliases = {key: dict(pairs) for key, pairs in table["aliases"].items()}
    return Kernels(table["runtime"], "cuda", registrations, aliases)


def _key(domain: str, op_type: str) -> str:
    return f"{domain or 'ai.onnx'}::{op_type}"
