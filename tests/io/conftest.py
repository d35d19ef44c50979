from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from uncollapse.backbones import torchvision_ops
from uncollapse.cli.app import app
from uncollapse.io.batches import built_in_sentences

torchvision_ops.declare()  # before any test of this folder imports transformers or timm

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return invoke


def make_tokenizer(**special: str) -> Any:
    """Words of the built-in sentences."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "</s>"])
    words.train_from_iterator(built_in_sentences(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>", **special)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models of transformers, saved with their tokenizers and image processors."""
    import transformers as hf

    tokenizer, images = make_tokenizer(pad_token="[PAD]"), hf.ViTImageProcessor(size={"height": 32, "width": 32})
    vocabulary = len(tokenizer)
    bert = hf.BertModel(hf.BertConfig(vocab_size=vocabulary, max_position_embeddings=40, **SIZES))
    gpt2_sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 2}
    text = {"vocab_size": vocabulary, "max_position_embeddings": 30, "bos_token_id": 2, "eos_token_id": 2, **SIZES}
    clip = hf.CLIPConfig(text_config=text, vision_config={**SIZES, **IMAGE}, projection_dim=16)
    t5 = hf.T5Config(vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    saved: dict[str, list[Any]] = {
        "bert": [bert, tokenizer],
        "no_tokenizer": [bert],
        "gpt2": [hf.GPT2Model(hf.GPT2Config(vocab_size=vocabulary, **gpt2_sizes)), make_tokenizer()],
        "vit": [hf.ViTModel(hf.ViTConfig(**SIZES, **IMAGE)), images],
        "clip": [hf.CLIPModel(clip), tokenizer, images],
        "t5": [hf.T5Model(t5), tokenizer],
    }
    root = tmp_path_factory.mktemp("models")
    for name, parts in saved.items():
        for part in parts:
            part.save_pretrained(root / name)
    return {name: root / name for name in saved}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five colored images, a grey one, a broken one and a text."""
    import numpy
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    (folder / "below").mkdir()
    numbers = numpy.random.default_rng(0)
    for name in "abcde":
        Image.fromarray(numbers.integers(0, 255, (40, 50, 3), dtype="uint8")).save(folder / "below" / f"{name}.png")
    Image.fromarray(numbers.integers(0, 255, (40, 50), dtype="uint8")).save(folder / "grey.JPG", format="jpeg")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image either", encoding="utf-8")
    return folder
