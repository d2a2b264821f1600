"""Replicas that train together, each in a process of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from support.train import replica


def started(out: Path, *options: str, world: int = 2, missing: int = 0) -> list[tuple[int, str]]:
    """Exit code and stderr of each replica; all but the last `missing` are really started."""
    with socket.socket() as held:  # until the end, so that the port is given to no other process
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        told = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(replica.__file__), str(out), *options]
        ran = [
            subprocess.Popen(command, env={**os.environ, **told, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            for rank in range(world - missing)
        ]
        return [(process.returncode, said) for process, (_, said) in ((p, p.communicate(timeout=300)) for p in ran)]
