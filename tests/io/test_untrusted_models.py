"""Folders of strangers' models: sizes beyond the memory, files that never end, and code of the package `kernels`."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import Result

from uncollapse.errors import UsageError
from uncollapse.io import untrusted_models
from uncollapse.io.hf_models import Origin, load_classifier, load_tokenizer
from uncollapse.io.models import load_model
from uncollapse.io.untrusted_models import available_memory, bounded_size, check_folder, check_size

pytest.importorskip("transformers")

Change = Callable[..., Path]


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Change:
    """Copy a saved model, with changes of one of its configs."""

    def change(name: str = "bert", config: str = "config.json", **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(folders[name], folder, dirs_exist_ok=True)
        old = json.loads((folder / config).read_text()) if (folder / config).exists() else {}
        (folder / config).write_text(json.dumps({**old, **changes}))
        return folder

    return change


@pytest.mark.parametrize("random_weights", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_labels": 10**10}, "num_labels"),
        ({"num_hidden_layers": 10**6}, "tensors"),
        ({"vocab_size": 10**11}, "GB of memory"),
        ({"intermediate_size": 10**12}, "GB of memory"),
        ({"hidden_size": 2 * 10**9, "num_attention_heads": 2}, "cannot be loaded|GB of memory"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    changed: Change, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], said: str, random_weights: bool
) -> None:
    monkeypatch.setattr(untrusted_models, "MOST_TENSORS", 2000)
    with pytest.raises(UsageError, match=said):
        load_model(str(changed(**changes)), random_weights=random_weights)


def test_the_command_ends_with_2_and_says_what_to_do(changed: Change, run: Callable[..., Result]) -> None:
    result = run("diagnose", changed(vocab_size=10**11), "--random-weights", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--dtype" in result.stderr


def test_a_classifier_that_does_not_fit_is_refused(changed: Change) -> None:
    origin = Origin(str(changed(vocab_size=10**11)))
    for random_weights in (True, False):
        with pytest.raises(UsageError, match="memory"):
            load_classifier(origin, 2, random_weights=random_weights)


def test_sizes_in_the_format_of_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    facts = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}
    for sizes, said in (({"depth": 10**9}, "depth"), ({"embed_dim": 3 * 10**8}, "GB of memory")):
        (tmp_path / "config.json").write_text(json.dumps({**facts, "model_args": sizes}))
        with pytest.raises(UsageError, match=said):
            load_model(str(tmp_path), random_weights=True)


def test_sizes_of_a_sentence_model(changed: Change) -> None:
    pytest.importorskip("sentence_transformers")
    folder = changed(vocab_size=10**11)
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}])
    )
    with pytest.raises(UsageError, match="memory"):
        load_model(str(folder))


def test_parameters_are_counted_once_and_only_those_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted_models, "available_memory", lambda: 4 * 110.0)  # 110 weights of float32
    with bounded_size("m"):
        layer = nn.Linear(10, 10)
        layer.weight = nn.Parameter(torch.ones(10, 10))  # as loading does
        other = threading.Thread(target=nn.Linear, args=(10, 10))
        other.start()
        other.join()
        with pytest.raises(UsageError, match="m declares"):
            nn.Linear(1, 1)
    with bounded_size("m", quantized=True):
        nn.Sequential(*(nn.Linear(10, 10) for _ in range(8)))
    nn.Linear(100, 100)  # nothing is counted afterwards


def test_a_trial_build_takes_no_memory_and_draws_no_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_size(lambda: nn.Linear(10**4, 10**4), "m")
    check_size(lambda: torch.zeros(()).item(), "m")  # fails on the meta device: the real build decides
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UsageError, match="memory"):
        check_size(lambda: nn.Linear(10**8, 10**8), "m")
    assert 2**20 < available_memory() < 2**60


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors", "below/config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_all_files_of_a_folder_are_regular(changed: Change, name: str, kind: str) -> None:
    path = changed() / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="regular"):
        Origin(str(path.parent if path.parent.name == "bert" else path.parents[1]))


def test_texts_are_bounded_in_size_and_depth(changed: Change) -> None:
    folder = changed()
    (folder / "gone.txt").symlink_to(folder / "nowhere")  # as in a cache that was not filled
    check_folder(folder)
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate(2**29)
    with pytest.raises(UsageError, match=r"vocab\.txt has"):
        load_tokenizer(Origin(str(folder)))
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text('{"a":' * 100_000)
    with pytest.raises(UsageError, match="bert"):
        load_tokenizer(Origin(str(folder)))


CODE = "stranger/kernel:attention"


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("config.json", {"_attn_implementation": CODE}),
        ("config.json", {"attn_implementation": {"": CODE}}),
        ("config.json", {"text_config": {"_attn_implementation": CODE}}),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": CODE}}),
        ("sentence_bert_config.json", {"model_args": {"allow_all_kernels": True}}),
    ],
)
def test_no_kernel_of_a_stranger_is_loaded(
    changed: Change, monkeypatch: pytest.MonkeyPatch, config: str, changes: dict[str, Any]
) -> None:
    import transformers.integrations.hub_kernels as hub_kernels

    kernels: Any = ModuleType("kernels")
    loaded: list[str] = []
    kernels.get_kernel = lambda name, **_: loaded.append(name)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", kernels.get_kernel)
    for random_weights in (True, False):
        with pytest.raises(UsageError, match="code"):
            load_model(str(changed(config=config, **changes)), random_weights=random_weights)
    assert not loaded


def test_the_attention_of_transformers_itself_is_allowed(changed: Change) -> None:
    model: Any = load_model(str(changed(_attn_implementation="eager"))).model
    assert model.config._attn_implementation == "eager"


def test_configs_on_the_hub_are_checked_too(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(_attn_implementation=CODE)
    monkeypatch.setattr("uncollapse.io.hf_models.is_on_hub", lambda _: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(UsageError, match="code"):
        Origin("stranger/model")
