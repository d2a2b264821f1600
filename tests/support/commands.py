"""Commands in processes of their own, without this package's settings in their environment."""

import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def run(*command: object, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended; `amp-rewrite` and `python` are those of the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AMP_REWRITE")}
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def ran(*command: object, cwd: str | Path = ROOT, **environment: str) -> str:
    """What a command printed that has to succeed."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
