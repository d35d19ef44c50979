"""Several processes as torchrun starts them, without its two seconds: the store that they meet in is kept here."""

import os
import subprocess
import sys
from pathlib import Path

from torch import distributed

SOURCE = Path(__file__).parents[1] / "src"


def start(count: int, *command: str) -> tuple[list["subprocess.Popen[str]"], distributed.TCPStore]:
    """Python with a command in each of the processes, and the store, which must live as long as they do."""
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


def ended(started: list["subprocess.Popen[str]"], seconds: float = 120) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of each; none is left running."""
    try:
        heard = [each.communicate(timeout=seconds) for each in started]
    finally:
        for each in started:
            each.kill()
    return [(each.returncode, *told) for each, told in zip(started, heard, strict=True)]
