"""Replace the machine code for other GPUs in a CUDA library with zeros, so that the file compresses well.

    python benchmarks/run.py fatbin SOURCE TARGET [--keep 90]

Payloads (ELF and PTX) for other architectures in `.nv_fatbin` become zeros; headers, offsets and all other bytes of the
file stay. A driver picks the best entry for its device and never reads the other payloads, so the code for the kept
architectures is byte for byte the vendor's. Code that exists for only one architecture also becomes zeros: in
onnxruntime-gpu 1.31.1 and sm_90, products of mixtures of experts and of float8. So do kernels that no row runs
(`UNUSED`); reading their names in compressed code needs the package zstandard.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import mmap
import re
import shutil
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
KINDS = (PTX, ELF, 16, 64)
SECTION = b".nv_fatbin"
LARGEST_HEADER = 4096
ZSTANDARD = b"\x28\xb5\x2f\xfd"
"""The first bytes of compressed code."""
NAME = re.compile(rb"\.text\.(\w+)")
UNUSED = re.compile(
    rb"[Mm]oe|MOE"  # mixtures of experts
    rb"|fpA_intB|Int[248]Details|MatMulNBits|MatMulFloat[48]|block_scaled|Dequantize(?:Blockwise|4Bits)"  # few bits
    rb"|grp\d+_\w+?_(?:fp8|int8|int4|paged|spec_dec)"  # attention over caches of few bits, or in pages
)
"""Names of kernels not run by any row of the measurement."""


class FormatError(ValueError):
    """An error for a file that is not a CUDA library of nvcc 13, or cannot be read here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Code for one architecture. `sm`: 90 for compute capability 9.0. `lone`: the only architecture with this code."""

    kind: int
    sm: int
    at: int
    size: int
    lone: bool

    @property
    def word(self) -> str:
        """Return kind and architecture in words."""
        return f"{'ptx' if self.kind == PTX else 'elf'} sm_{self.sm}"


def section(data: mmap.mmap | bytes, wanted: bytes) -> tuple[int, int]:
    """Return the offset and size of a section of a 64-bit ELF file; raise FormatError if there is none."""
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        raise FormatError("the file is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    base = headers[names][4] if names < count else 0
    for header in headers:
        start = base + header[0]
        if data[start : data.find(b"\0", start)] == wanted:
            return header[4], header[5]
    raise FormatError(f"the file has no section {wanted.decode()}: it contains no GPU code")


def entries(data: mmap.mmap | bytes, start: int, size: int) -> Iterator[Entry]:
    """Yield the entries of all fat binaries in a part of a file; raise FormatError for an unknown entry."""
    at, end = start, start + size
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        inner, stop, found = at + header, at + header + length, list[tuple[int, int, int, int]]()
        while inner < stop:
            kind, _, own, padded = struct.unpack_from("<HHIQ", data, inner)
            (sm,) = struct.unpack_from("<I", data, inner + 28)
            if kind not in KINDS or not 48 <= own <= LARGEST_HEADER or inner + own + padded > stop:
                raise FormatError(f"unknown entry at {inner:#x}: kind {kind}, header {own}, payload {padded}")
            found.append((kind, sm, inner + own, padded))
            inner += own + padded
        yield from (Entry(*entry, len(found) == 1) for entry in found)
        at = stop


def is_unused(payload: bytes) -> bool:
    """Return True if code has a kernel that no row runs; raise FormatError if it needs zstandard and lacks it."""
    if payload.startswith(ZSTANDARD):
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError as missing:
            raise FormatError("the names of kernels are compressed; `pip install zstandard` to read them") from missing
        payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    return any(UNUSED.search(name) for name in NAME.findall(payload))


def blanked(source: Path, target: Path, keep: Collection[int] = (90,)) -> dict[str, object]:
    """Copy a library without the code for other architectures, and without the kernels that no row runs.

    Return the bytes by kind, the bytes kept and unused, and a digest of the code kept.
    """
    shutil.copy(source, target)
    there: Counter[str] = Counter()
    kept, count, unused = hashlib.sha256(), 0, 0
    with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entry in list(entries(data, *section(data, SECTION))):
            there[entry.word] += entry.size
            payload = data[entry.at : entry.at + entry.size]
            wanted = entry.sm in keep and entry.kind != PTX and not entry.lone
            if wanted and not is_unused(payload):
                kept.update(payload)
                count += entry.size
            else:
                unused += entry.size if wanted else 0
                data[entry.at : entry.at + entry.size] = bytes(entry.size)
    if not count:
        raise FormatError(
            f"the file has no code for sm_{', sm_'.join(map(str, keep))}, only {', '.join(sorted(there))}"
        )
    return {"bytes": dict(sorted(there.items())), "kept": count, "unused": unused, "sha256": kept.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--keep", type=int, nargs="+", default=[90])
    args = parser.parse_args()
    print(blanked(args.source, args.target, args.keep))


if __name__ == "__main__":
    main()
