"""JSON that this package wrote and somebody has changed: diagnoses, cures, results, journals, kept models."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import uncollapse as uc
from uncollapse import report
from uncollapse.attachment.attach import attachments
from uncollapse.attachment.save import DESCRIPTION, WEIGHTS
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io import timm_models
from uncollapse.lab.engine.checkpoints import STATE, Checkpoints
from uncollapse.lab.experiments.depth_probe import config as saved_encoders
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import Results
from uncollapse.lab.tables.markdown import table_json, to_markdown
from uncollapse.lab.tables.paper_table import build_cells
from uncollapse.report.page import render_page

from .damage import answer, as_json, changed, damaged, few

SAID = (ValueError, FileExistsError)  # what the library documents; UsageError is one of them


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    torch.manual_seed(0)
    return uc.diagnose(encoder(), [torch.randn(4, 6, 8)], labels=uc.Labels(example=list("abcdef")))


def checks(content: Any, raw: bytes, check: Any, examples: int) -> None:
    """Run a check on changed JSON, and on damaged bytes of it."""
    few(examples)(given(changed(content))(lambda value: check(as_json(value))))()
    few(examples // 3)(given(damaged(raw))(check))()


def test_diagnoses(folder: Path, diagnosis: Diagnosis) -> None:
    """What is read can be shown: as text, and as a page beside the one that it was."""
    raw = diagnosis.to_json().encode()
    pages = 0

    def check(content: bytes) -> None:
        nonlocal pages
        path = folder / "d.json"
        path.write_bytes(content)
        found = answer(Diagnosis.load, path, refusals=(ValueError,))
        if isinstance(found, Diagnosis):
            assert str(found)
            report.difference(diagnosis, found)
            render_page([diagnosis, found]) if pages < 40 else None
            pages += 1

    checks(json.loads(raw), raw, check, 240)
    assert pages > 5


def test_cures(folder: Path) -> None:
    """A model gets the cure, or stays as it was."""
    place, model = folder / "cure", encoder()
    uc.attach(model, "contra_norm", scale=0.5)
    uc.save_cure(model, place)
    uc.detach(model)
    raw = (place / DESCRIPTION).read_bytes()

    def check(content: bytes) -> None:
        (place / DESCRIPTION).write_bytes(content)
        found = answer(uc.load_cure, model, place, refusals=SAID)
        assert len(attachments(model)) == (0 if isinstance(found, Exception) else len(found))
        uc.detach(model)

    checks(json.loads(raw), raw, check, 150)
    (place / DESCRIPTION).write_bytes(raw)

    @few(20)
    @given(damaged((place / WEIGHTS).read_bytes()))
    def weights(content: bytes) -> None:
        (place / WEIGHTS).write_bytes(content)
        answer(uc.load_cure, model, place, refusals=SAID)
        uc.detach(model)

    weights()


def test_results(folder: Path) -> None:
    """A result counts and can be laid out, or does not count."""
    recipe, results = RECIPES["gcn-depth"], Results(folder / "results")
    config = recipe.config()
    record = {"recipe": recipe.name, "config": asdict(config), "seed": 0, "figures": {"test": 0.5, "validation": 0.6}}
    record |= {"seconds": 1.0, "date": "2025-01-01T00:00:00+00:00", "versions": {}, "layers": {}}
    path = results.save(recipe, config, record)
    raw = path.read_bytes()
    table = next(iter(recipe.tables.values()))

    def check(content: bytes) -> None:
        path.write_bytes(content)
        records = answer(results.all, recipe)
        if not isinstance(records, Exception):
            answer(to_markdown, table, records)
            answer(lambda: json.dumps(table_json(table, build_cells(table, records)), allow_nan=False))
        answer(results.find, recipe, config)

    checks(json.loads(raw), raw, check, 200)


def test_journals(folder: Path, diagnosis: Diagnosis) -> None:
    place = folder / "run"
    monitor = uc.Monitor([torch.randn(4, 6, 8)], every=1, folder=place, rules=uc.Rule("effective_rank", falls_by=0.5))
    model = encoder()
    for step in range(3):
        monitor.step(model, step)
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    lines = [json.loads(line) for line in files["monitor.jsonl"].splitlines()]

    def restore(content: bytes) -> None:
        for name, was in (files | {"monitor.jsonl": content}).items():
            (place / name).write_bytes(was)

    def check(content: bytes) -> None:
        restore(content)
        again = uc.Monitor([torch.randn(4, 6, 8)], every=1, folder=place, rules=uc.Rule("effective_rank", falls_by=0.5))
        answer(again.step, model, 3, refusals=SAID)

    few(40)(
        given(changed(lines))(
            lambda value: check(b"\n".join(map(as_json, value if isinstance(value, list) else [value])))
        )
    )()
    few(20)(given(damaged(files["monitor.jsonl"]))(check))()


def test_checkpoints(folder: Path) -> None:
    """A checkpoint that was changed is not used."""
    checkpoints = Checkpoints(folder / "checkpoints", "0f3a")
    place = checkpoints.save(20, {"model": {"weight": torch.ones(2)}}, {"loss": 0.5})
    raw = (place / STATE).read_bytes()

    def check(content: bytes) -> None:
        (place / STATE).write_bytes(content)
        found = answer(checkpoints.load)
        assert found is None or (found.step, found.state) == (20, {"loss": 0.5})
        answer(checkpoints.newest)

    checks(json.loads(raw), raw, check, 150)


@pytest.mark.parametrize("name", ["config.json", "settings.json"])
def test_kept_models(folder: Path, name: str) -> None:
    place = folder / f"kept-{name}"
    place.mkdir()
    written = {
        "dim": 8,
        "side": 8,
        "width": 0.25,
        "ema": 0.9,
        "architecture": "vit_tiny_patch16_224",
        "pretrained_cfg": {},
    }
    written |= {
        "num_classes": 3,
        "model_args": {"depth": 1, "embed_dim": 8},
        "label_names": ["a"],
        "talking_heads": False,
    }
    for file in ("config.json", "settings.json"):
        (place / file).write_bytes(as_json(written))

    def check(content: bytes) -> None:
        (place / name).write_bytes(content)
        for load in (
            saved_encoders.load_encoder,
            saved_models.load_vision_model,
            saved_models.load_text_model,
            timm_models.is_folder,
        ):
            answer(load, place)

    few(40)(given(changed(written))(lambda value: check(as_json(value))))()
    shutil.rmtree(place)
