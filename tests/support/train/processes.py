"""Replicas that train together, each in a separate process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from support.train import replica


def started(out: Path, *options: str, world: int = 2, missing: int = 0) -> list[tuple[int, str]]:
    """Return exit code and stderr of each replica; the last `missing` ones are not started."""
    with socket.socket() as reserved:  # until the end, so that no other process gets the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
        settings = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(replica.__file__), str(out), *options]
        running = [
            subprocess.Popen(
                command, env={**os.environ, **settings, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(world - missing)
        ]
        errors = [process.communicate(timeout=300)[1] for process in running]
        return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]
