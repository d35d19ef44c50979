"""Files that are cut off or have a wrong byte: one sentence, or the older checkpoint with a note; never a traceback.

Where there is a checksum (checkpoints, token ids) every change is noticed. JSON that still is what it should
be, such as one with another digit, cannot be told from a file that was edited.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.attachment.attach import attachments
from uncollapse.errors import UsageError
from uncollapse.lab.data.text.encoded_texts import encode
from uncollapse.lab.data.text.glue_files import Examples
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.depth_probe.config import load_encoder
from uncollapse.lab.runs import saved_models

from .machine import Machine, litter
from .remains import said
from .scenes import NEEDED, SCENES, TABLE, TRAIN, furnish
from .tearing import torn

Count = Callable[[str, object], None]


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def test_a_result_is_run_again(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    folder, cases = furnish(tmp_path / "it"), 0
    machine.run(folder, *TRAIN)
    whole, result = said(folder), only(folder, "*--*.json")
    for damage in torn(result, flips=3, cuts=3):
        table = machine.run(folder, *TABLE)
        assert table.code == 0 or "There are no results" in table.sentence, damage
        answer = machine.run(folder, *TRAIN)
        assert "Traceback" not in answer.err
        assert answer.code == 0 or result.name in answer.sentence, damage  # a setting that reads as another one
        if "is not a result" in answer.err:
            assert said(folder) == whole, damage
            assert litter(folder) == [str(result.relative_to(folder)) + ".broken"]
            Path(f"{result}.broken").unlink()
        cases += 1
    record_property("cases", cases)


def test_an_older_checkpoint_is_used(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    whole, cases = furnish(tmp_path / "whole"), 0
    operations = machine.run(whole, *TRAIN, watched=whole).operations
    first = furnish(tmp_path / "first")
    machine.run(first, *TRAIN, watched=first, fault="kill", at=int(0.6 * operations))
    newest = max(first.rglob("step-*")).relative_to(first)
    assert (first / newest).parent.glob("step-*")
    for name in ("model.safetensors", "optimiser.safetensors", "state.json"):
        for damage in torn(first / newest / name, flips=1, cuts=2):
            folder = Path(shutil.copytree(first, tmp_path / f"case-{cases}"))
            answer = machine.run(folder, *TRAIN)
            assert answer.code == 0, (damage, answer.err)
            if name != "state.json":
                assert f"{newest.name} is not used" in answer.err, damage
            assert "Traceback" not in answer.err
            assert said(folder) == said(whole), damage
            assert litter(folder) == []
            shutil.rmtree(folder)
            cases += 1
    record_property("cases", cases)


def test_a_diagnosis(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    folder, cases = furnish(tmp_path / "it"), 0
    for needed in NEEDED["report"]:
        machine.run(folder, *needed)
    for damage in torn(folder / "two" / "diagnosis.json", flips=10):
        answer = machine.run(folder, *SCENES["report"])
        assert answer.code == 0 or "two/diagnosis.json" in answer.sentence, (damage, answer.err)
        cases += 1
    record_property("cases", cases)


@pytest.mark.parametrize("name", ["monitor.jsonl", "first.json"])
def test_the_journal_of_a_monitor(machine: Machine, tmp_path: Path, name: str, record_property: Count) -> None:
    first, cases = furnish(tmp_path / "first"), 0
    assert machine.run(first, "monitor", "out", "2").code == 0
    for damage in torn(first / "out" / name, flips=5, cuts=3):
        folder = Path(shutil.copytree(first, tmp_path / f"case-{cases}"))
        answer = machine.run(folder, *SCENES["monitor"])
        assert answer.code == 0 or name in answer.sentence, (damage, answer.err)
        assert "Traceback" not in answer.err
        cases += 1
    record_property("cases", cases)


def test_the_study_of_a_search(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    first, cases = furnish(tmp_path / "first"), 0
    assert machine.run(first, *SCENES["tune"], 2).code == 0
    for damage in torn(first / "study" / "study.db", flips=4, cuts=3):
        folder = Path(shutil.copytree(first, tmp_path / f"case-{cases}"))
        answer = machine.run(folder, *SCENES["tune"])
        assert answer.code == 0 or "study.db" in answer.sentence, (damage, answer.err)
        cases += 1
    record_property("cases", cases)


def test_a_kept_model(tmp_path: Path, record_property: Count) -> None:
    config, cases = contrastive.ContrastConfig(dim=5, falls=(0.5,), width=0.03, side=16), 0
    saved_models.save_weights(Runtime(save_to=tmp_path / "model"), contrastive.build_encoder(config), config)
    for name in ("model.safetensors", "config.json"):
        for damage in torn(tmp_path / "model" / name, flips=10):
            cases, told = cases + 1, ""
            try:
                load_encoder(tmp_path / "model")
            except UsageError as error:
                told = str(error)
            if name == "model.safetensors" and " cut to " in damage:
                assert "model.safetensors" in told, damage
    load_encoder(tmp_path / "model")
    record_property("cases", cases)


def test_a_cure(tmp_path: Path, record_property: Count) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    cured, cases = made(), 0
    uc.attach(cured, "contra_norm", scale=0.5, learnable=True)
    uc.save_cure(cured, tmp_path)
    for name in ("uncollapse.safetensors", "uncollapse.json"):
        for damage in torn(tmp_path / name, flips=25):
            cases, model, told = cases + 1, made(), ""
            try:
                uc.load_cure(model, tmp_path)
            except ValueError as error:
                told = str(error)
            assert bool(told) is not bool(list(attachments(model))), damage  # all of it or nothing
            if name == "uncollapse.safetensors":
                assert "does not match uncollapse.json" in told, damage
    uc.load_cure(made(), tmp_path)
    record_property("cases", cases)


class Words:
    """A tokenizer that numbers letters."""

    truncation_side, model_input_names, pad_token_id = "right", ("input_ids",), 0
    init_kwargs: dict[str, Any] = {}  # noqa: RUF012 - as the real ones have it

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_token_ids_in_the_cache(tmp_path: Path, record_property: Count) -> None:
    examples, cases = Examples(["one", "another", "third"], None, None), 0
    whole = encode(examples, Words(), 12, classes=True, cache=tmp_path)
    kept = only(tmp_path, "*.safetensors")
    content = kept.read_bytes()
    for damage in torn(kept, flips=40):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = encode(examples, Words(), 12, classes=True, cache=tmp_path)
        assert torch.equal(found.ids, whole.ids), damage
        assert torch.equal(found.starts, whole.starts), damage
        assert kept.read_bytes() == content, damage  # made anew
        cases += 1
    record_property("cases", cases)
