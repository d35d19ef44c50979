"""Folders of sentence-transformers: tokens and embeddings by one command, and nobody's code."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.tiny_sentences_model import TEXTS, make
from typer.testing import Result

from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin
from uncollapse.io.models import find_modules, load_model

pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("sentences")
    make(here / "encoder").save_pretrained(str(here / "saved"))
    return here / "saved"


def test_the_command_measures_tokens_and_embeddings(folder: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    done = run("diagnose", folder, "--text", "texts.txt", "--json")
    assert done.exit_code == 0, done.output
    layers = json.loads(done.stdout)["layers"]
    assert [f"{layer['name']} {layer['place']}" for layer in layers] == [
        "embed block",
        "block 0 block",
        "block 1 block",
        "sentence embedding",
    ]
    assert layers[-1]["tokens"] == len(TEXTS)
    page = run("diagnose", folder, "--text", "texts.txt", "--max-length", 4, "--out", "out")
    assert "at most 4 tokens each" in page.output
    assert "sentence embedding" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_random_weights_are_the_encoder_alone(folder: Path) -> None:
    assert type(load_model(str(folder), random_weights=True).model).__name__ == "BertModel"


def test_without_the_library_the_encoder_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uncollapse.io.models.importlib.util.find_spec", lambda name: None)
    loaded = load_model(str(folder))
    assert type(loaded.model).__name__ == "BertModel"
    assert "uncollapse[st]" in loaded.note


@pytest.mark.parametrize(
    ("modules", "word"),
    [
        ([{"idx": 0, "name": "0", "path": "", "type": "evil.Module"}], "own code"),
        ([{"idx": 0, "name": "0", "path": "", "type": "os.system"}], "own code"),
        ([], "list of modules"),
        ({"a": 1}, "list of modules"),
        ([{"type": 3}], "list of modules"),
        ("[" * 100_000, "valid"),
    ],
)
def test_strange_modules_are_refused(folder: Path, tmp_path: Path, modules: Any, word: str) -> None:
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    text = modules if isinstance(modules, str) else json.dumps(modules)
    (tmp_path / "modules.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=word):
        load_model(str(tmp_path))


def test_a_pipe_does_not_block(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    os.mkfifo(tmp_path / "modules.json")
    with pytest.raises(UsageError, match="regular file"):
        load_model(str(tmp_path))


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("uncollapse.io.hf_models.is_on_hub", lambda name: False)
    asked: list[Any] = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_modules(Origin("some/model")) == tmp_path / "modules.json"
    assert asked == [("some/model", "modules.json", {"local_files_only": True})]
