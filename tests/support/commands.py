"""Commands in separate processes, without this package's settings in their environment."""

import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def run(*command: object, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; `amp-rewrite` and `python` are those of the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AMP_REWRITE")}
    inherited["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), inherited.get("PATH", "")))
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def output_of(*command: object, cwd: str | Path = ROOT, **environment: str) -> str:
    """Run a command that must succeed and return its stdout."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
