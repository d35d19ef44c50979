"""Commands that write files, each small enough to be run many times; see `server` for who runs them."""

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = """
import torch
from torch import nn


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 12, 16, generator=generator) for _ in range(2)]
"""
RUN = ["train", "gcn-depth", "--nodes", "180", "--layers", "2", "--hidden", "8", "--epochs", "2"]
TRAIN = [*RUN, "--results", "results", "--runs", "runs", "--device", "cpu", "--json"]
DIAGNOSE = ["diagnose", "models.py:encoder", "--batches", "models.py:batches", "--no-baseline", "--device", "cpu"]
TABLE = ["table", "gcn-depth", "--results", "results"]
SCENES: dict[str, list[str]] = {
    "train": TRAIN,
    "train with everything": [*TRAIN, "--save", "--track", "jsonl"],
    "train again": [*TRAIN, "--save", "--again"],
    "diagnose": [*DIAGNOSE, "--out", "out"],
    "report": ["compare", "one/diagnosis.json", "two/diagnosis.json", "--out", "out/report.html"],
    "table": [*TABLE, "--html", "out/page.html", "--markdown", "out/table.md"],
    "embeddings": ["embeddings", "rows.npy", "--out", "out", "--draws", "0"],
    "monitor": ["monitor", "out"],
    "tune": ["tune", "study"],
    "cure": ["cure", "out", "50"],
}
NEEDED = {  # what is there before a scene begins, besides the models and the rows
    "train again": [[*TRAIN, "--save"]],
    "report": [[*DIAGNOSE, "--out", "one"], [*DIAGNOSE, "--attention", "--out", "two"]],
    "table": [TRAIN],
    "cure": [["cure", "out", "30"]],  # another one, which must not be lost
}


def furnish(folder: Path) -> Path:
    """A folder with models.py and rows.npy."""
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    numpy.save(folder / "rows.npy", numpy.random.default_rng(0).normal(size=(5000, 8)).astype("float32"))
    return folder


def command(arguments: list[str]) -> int:
    """Run the command line in this process; its exit code. `monitor`, `tune` and `cure` are scripts with `uc`."""
    own = {"monitor": _monitored, "tune": _tuned, "cure": _cured}
    if arguments[0] in own and not arguments[1].startswith("gcn"):
        return _told(lambda: own[arguments[0]](Path(arguments[1]), *map(int, arguments[2:])))
    from uncollapse.cli.app import app

    try:
        app(arguments, prog_name="uncollapse")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _told(work: Callable[[], None]) -> int:
    """What a user's own script does: an error is what it says. The exit code."""
    sys.path.insert(0, ".")
    try:
        work()
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _monitored(folder: Path, steps: int = 4) -> None:
    """Steps 1 to 4, measured each; goes on from where its folder is, as a training with a checkpoint a step would."""
    import models
    import torch

    from uncollapse.monitoring.monitor import Monitor

    monitor = Monitor(models.batches(), every=1, folder=folder)
    for step in range(_lines(folder) + 1, steps + 1):
        model = models.encoder()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.1 * step)
        monitor.step(model, step)


def _tuned(folder: Path, trials: int = 4) -> None:
    """A search whose trials are not trained but measured; what it finds is written beside its study."""
    import models
    import torch

    import uncollapse as uc
    from uncollapse.io.files import write

    def judged(model: Any, trial: Any) -> float:
        with torch.no_grad():
            figure = 1 - float(uc.mean_cosine(model.eval()(models.batches()[0])).mean())
        trial.report(1, figure)
        return figure

    found = uc.tune(models.encoder, judged, study=folder, trials=trials)
    facts = [{name: value for name, value in each.facts().items() if name != "seconds"} for each in found.trials]
    write(folder / "found.json", json.dumps({"line": found.attach_line, "trials": facts}))


def _cured(folder: Path, percent: int) -> None:
    """Save a cure with weights, of which the scale is given in percent."""
    import models

    import uncollapse as uc

    model = models.encoder()
    uc.attach(model, "contra_norm", scale=percent / 100, learnable=True)
    uc.save_cure(model, folder)


def _lines(folder: Path) -> int:
    """How many lines of a monitor are whole; the last one may lack its line feed."""
    path, whole = folder / "monitor.jsonl", 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            whole += isinstance(json.loads(line), dict)
    return whole


def warm_up() -> None:
    """Import all and do all of it once, so that children have little left to do. Checkpoints come after every step."""
    import torch

    from uncollapse.backbones import torchvision_ops

    torchvision_ops.declare()
    torch.set_num_threads(1)
    from uncollapse.lab.engine.runtime import Runtime

    names = [field.name for field in dataclasses.fields(Runtime)]
    given: Any = Runtime.__init__
    values = zip(names, given.__defaults__, strict=True)
    given.__defaults__ = tuple(0.0 if name == "save_seconds" else value for name, value in values)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(furnish(Path(folder))), quiet:
        for name in ("train with everything", "diagnose", "table", "embeddings", "tune"):
            if command(SCENES[name]) != 0:
                raise RuntimeError(f"{name} does not work, without any fault.")
