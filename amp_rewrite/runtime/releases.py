"""The kernel table that serves a release of onnxruntime: a shipped one, or one that a registry dump holds."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path

from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.runtime.kernels import Kernels, kernels_of, release_number, releases


def known_release(release: str) -> str:
    """Return the release whose table serves a release: "1.22" is its newest patch, "" the newest of all.

    A release between two tables gets the older one, and one that is newer than all the newest: it gains no kernel that
    is not known. PolicyError for one that is older than the oldest table, and for text that is not a release.
    """
    known = releases()
    if not release:
        return known[-1]
    number = release_number(release)
    if not number:
        raise PolicyError(f"{release!r} is not a release of onnxruntime; use one of {', '.join(known)}")
    of_patch = [name for name in known if release_number(name)[: len(number)] == number]
    served = of_patch or [name for name in known if release_number(name) <= number]
    if not served:
        raise PolicyError(
            f"no kernel table of onnxruntime-gpu {release}: tables begin at {known[0]}; run `amp-rewrite doctor"
            f" --dump-kernels FILE` with {release} and give {spelled('target')} the file"
        )
    return served[-1]


@functools.cache
def installed_release() -> str:
    """Return the release of the installed onnxruntime-gpu, else of another build of onnxruntime; "" without a table."""
    for package in ("onnxruntime-gpu", "onnxruntime"):
        try:
            found = metadata.version(package)
            known_release(found)
        except (metadata.PackageNotFoundError, PolicyError):
            continue
        return found
    return ""


def read_kernels(file: Path) -> Kernels:
    """Read the kernel table of a file that `amp-rewrite doctor --dump-kernels` wrote; PolicyError for another file."""
    from amp_rewrite.runtime.registry import table_of  # late: most conversions use a shipped table

    try:
        dump = json.loads(file.read_text(encoding="utf-8"))
    except OSError as cause:
        raise PolicyError(f"cannot read the kernel table {file}: {cause.strerror}") from cause
    except ValueError as cause:
        raise PolicyError(f"{file} is not JSON; write one with `amp-rewrite doctor --dump-kernels FILE`") from cause
    try:
        return kernels_of(table_of(dump))
    except PolicyError as cause:
        raise PolicyError(f"{file}: {cause}") from cause
