"""Runs commands in children of a process that has imported everything, with faults; and looks at what they left."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ALL = os.environ.get("UNCOLLAPSE_FAULTS") == "all"  # every point of every command, which takes minutes
CANNOT_MOUNT = 77
LITTER = re.compile(r"\..*|.*\.(part|lock|old|broken)")


@dataclass(frozen=True)
class Answer:
    """What came of a command. operations: on files, if counted. tree: files of a small disk with checksums."""

    code: int
    out: str
    err: str
    operations: int = 0
    tree: Mapping[str, str] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The one sentence that an error is."""
        errors = [line for line in self.err.splitlines() if line.startswith("Error: ")]
        assert "Traceback" not in self.err, self.err
        assert len(errors) == 1, self.err
        return errors[0].removeprefix("Error: ")


class Machine:
    """The process that forks."""

    def __init__(self, folder: Path) -> None:
        self._told = folder
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server.txt").open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "UNCOLLAPSE_CACHE": str(folder / "cache")},
        )
        self._hear()

    def run(
        self,
        folder: Path,
        *arguments: object,
        fault: str | None = None,
        at: int = 0,
        watched: Path | None = None,
        disk: Mapping[str, Any] | None = None,
        after: float | None = None,
        limit: int | None = None,
        out: str | None = None,
    ) -> Answer:
        """Run a command in a folder.

        Args:
            folder: where.
            arguments: of the command line.
            fault: "kill", "vanish" or the name of an errno, in place of an operation on files below `watched`.
            at: the number of that operation, from 1.
            watched: where operations are counted; nothing is without one.
            disk: a small disk instead of the folder: `room` bytes left, or `read_only`.
            after: seconds after which the child is killed.
            limit: bytes that a file may have.
            out: a file for what is printed.
        """
        order = {"fault": fault, "at": at, "watched": watched and str(watched), "disk": disk, "after": after}
        order |= {"limit": limit, "out": out, "tree": disk is not None}
        (answer,) = self._answers([(folder, arguments, order)])
        if disk is not None and answer.code == CANNOT_MOUNT:
            pytest.skip("mounting a small disk is not allowed here")
        return answer

    def run_together(self, folder: Path, *commands: list[str]) -> list[Answer]:
        """Run commands in a folder at the same time."""
        return self._answers([(folder, arguments, {"after": None}) for arguments in commands])

    def _answers(self, asked: list[tuple[Path, Iterable[object], dict[str, Any]]]) -> list[Answer]:
        orders = []
        for number, (folder, arguments, more) in enumerate(asked):
            told = self._told / f"told-{number}"
            told.mkdir(exist_ok=True)
            orders.append({"arguments": [*map(str, arguments)], "folder": str(folder), "told": str(told), **more})
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        return [Answer(**facts) for facts in self._hear()]

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(30)

    def _hear(self) -> Any:
        line = self._process.stdout.readline()
        assert line, (self._told / "server.txt").read_text()
        return json.loads(line)


def points(count: int, few: int, seed: int = 0) -> list[int]:
    """Numbers of operations, from 1: a few by chance, or all if the environment asks for that."""
    chosen = range(1, count + 1)
    return list(chosen) if ALL else sorted(random.Random(seed).sample(chosen, min(few, count)))


def litter(folder: Path) -> list[str]:
    """What nobody asked for: files on their way, locks, and what was set aside."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return sorted(str(name) for name in names if LITTER.fullmatch(name.name))
