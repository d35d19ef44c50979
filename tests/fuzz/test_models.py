"""Folders of models that somebody has changed, and models that several threads use at once."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.io.batches import built_in_sentences, token_limit
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.io.models import load_model

from .damage import answer, as_json, changed, damaged, few

torchvision_ops.declare()
JSONS = ("config.json", "tokenizer_config.json", "tokenizer.json", "sentence_bert_config.json")
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers, with its tokenizer."""
    hf = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("models") / "intact"
    words: Any = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(built_in_sentences()[:5], trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.save_pretrained(folder)
    hf.BertModel(hf.BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "model_args": {}}))
    return folder


def use(folder: Path) -> None:
    """Build the model with its weights, and with random ones, and encode a text."""
    answer(lambda: load_model(str(folder)))
    answer(lambda: load_model(str(folder), random_weights=True))
    tokenizer = answer(lambda: load_tokenizer(Origin(str(folder))))
    if not isinstance(tokenizer, Exception):
        answer(lambda: token_limit(tokenizer, nn.Identity(), None))
        tokenizer(["The wind turned"])


@pytest.mark.parametrize("name", JSONS)
def test_changed_folders_are_loaded_or_refused(saved: Path, name: str) -> None:
    folder = saved.with_name(name)
    shutil.copytree(saved, folder)
    raw = (saved / name).read_bytes()

    def check(content: bytes) -> None:
        (folder / name).write_bytes(content)
        use(folder)

    few(12)(given(changed(json.loads(raw)))(lambda value: check(as_json(value))))()
    few(6)(given(damaged(raw))(check))()


@few(12)
@given(
    st.sampled_from(sorted(SIZES | {"vocab_size": 0, "max_position_embeddings": 0, "num_labels": 0})),
    st.sampled_from([-1, 0, 1, 3, 10**4, 10**6, 10**7, 10**9, 10**12, 2**63, 10**30]),
)
@example("num_hidden_layers", 10**7)
def test_any_size_is_built_or_refused(saved: Path, field: str, size: int) -> None:
    folder = saved.with_name("sizes")
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    facts = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, field: size}))
    if (field, size) != ("num_hidden_layers", 10**4):  # which can be built, in a minute
        answer(lambda: load_model(str(folder), random_weights=True))


@few(12)
@given(damaged((b"\x00" * 64) + b"tensor"))
def test_any_weights_are_read_or_refused(saved: Path, content: bytes) -> None:
    folder = saved.with_name("weights")
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    answer(lambda: load_model(str(folder)))


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 3, 5, 8, generator=torch.Generator().manual_seed(count)))


def measure(model: nn.Module, count: int) -> Any:
    found = uc.diagnose(model, batches(count), plan=uc.Plan(baseline=0))
    return [layer.measures for layer in found.layers], found.tokens


def run(model: nn.Module, count: int) -> None:
    with torch.no_grad():
        for x in batches(count):
            model(x)


def mend(model: nn.Module, count: int) -> None:
    with uc.attach(model, "contra_norm", scale=0.1):
        run(model, count)


WORK: dict[str, Callable[[nn.Module, int], Any]] = {"measure": measure, "run": run, "mend": mend}


@few(15)
@given(
    st.lists(
        st.tuples(st.sampled_from(["measure", "run"]), st.integers(0, 1), st.integers(1, 3)), min_size=2, max_size=4
    )
)
def test_threads_that_read_give_what_one_does(jobs: list[tuple[str, int, int]]) -> None:
    """Diagnoses and plain passes of one model or two; each diagnosis is that of its batches alone."""
    check_threads(jobs)


@few(10)
@given(st.lists(st.tuples(st.sampled_from(["measure", "mend"]), st.integers(1, 3)), min_size=2, max_size=4))
def test_threads_with_models_of_their_own_may_do_anything(jobs: list[tuple[str, int]]) -> None:
    check_threads([(work, number, count) for number, (work, count) in enumerate(jobs)])


def check_threads(jobs: list[tuple[str, int, int]]) -> None:
    """Run (work, number of the model, batches) in one thread each, and compare with one after the other."""
    from torch._dynamo import eval_frame

    models = [encoder() for _ in range(1 + max(number for _, number, _ in jobs))]
    found: dict[int, Any] = {}
    gate = threading.Barrier(len(jobs))

    def start(place: int, work: str, model: nn.Module, count: int) -> None:
        gate.wait(30)
        try:
            found[place] = WORK[work](model, count)
        except BaseException as error:
            found[place] = error

    threads = [
        threading.Thread(target=start, args=(place, work, models[number], count))
        for place, (work, number, count) in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place, (work, _, count) in enumerate(jobs):
        assert found[place] == WORK[work](encoder(), count), jobs
    assert torch.backends.mha.get_fastpath_enabled()
    assert eval_frame._stance.stance == "default"
    modules = [module for model in models for module in model.modules()]
    assert all(module.training for module in modules)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
