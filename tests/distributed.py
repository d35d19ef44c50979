"""Start several processes as torchrun does, without its two seconds: the store where they meet lives here."""

import os
import subprocess
import sys
from pathlib import Path

from torch import distributed

SOURCE = Path(__file__).parents[1] / "src"


def start(count: int, *command: str) -> tuple[list["subprocess.Popen[str]"], distributed.TCPStore]:
    """Run Python with a command in each process; return them and the store, which must live as long as they do."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return started, store


def finish(started: list["subprocess.Popen[str]"], seconds: float = 120) -> list[tuple[int, str, str]]:
    """Wait for all, and return the exit code, stdout and stderr of each; none is left running."""
    try:
        outputs = [each.communicate(timeout=seconds) for each in started]
    finally:
        for each in started:
            each.kill()
    return [(each.returncode, *output) for each, output in zip(started, outputs, strict=True)]
