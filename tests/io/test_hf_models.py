"""Models of transformers by folder, with text and images."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io.batches import built_in_sentences
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.io.loading import silence_libraries
from uncollapse.io.models import load_model

pytest.importorskip("transformers")

Run = Callable[..., Result]
Folders = dict[str, Path]


def diagnosed(run: Run, *arguments: object, stdin: str | None = None) -> Diagnosis:
    result = run("diagnose", *arguments, "--json", "--no-baseline", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return Diagnosis.from_json(result.stdout)


def test_built_in_sentences_and_no_chatter(run: Run, folders: Folders) -> None:
    result = run("diagnose", folders["bert"], "--json")
    assert result.stderr == "No data was given, so bert reads 120 built-in sentences, at most 40 tokens each.\n"
    found = Diagnosis.from_json(result.stdout)
    assert (found.model, found.architecture, found.sequences, found.batches) == ("bert", "BertModel", 120, 4)
    assert found.example[:5] == ("A", "glass", "of", "cold", "water")
    assert len(found.example) == len(found.layers[0].heatmap)
    assert found.baseline != ()


def test_the_numbers_are_those_of_the_model_called_by_hand(run: Run, folders: Folders) -> None:
    import uncollapse as uc

    texts = ["The wind turned", "Old photographs fade when they hang in the sun ."]
    found = diagnosed(run, folders["bert"], "--text", "-", stdin="\n".join(texts))
    model = load_model(str(folders["bert"])).model.eval()
    encoded = load_tokenizer(Origin(str(folders["bert"])))(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        last = model(**encoded).last_hidden_state
    expected = uc.mean_cosine(last, encoded["attention_mask"].bool()).mean()
    assert found.layers[-1]["mean_cosine"] == pytest.approx(float(expected), rel=1e-5)
    assert found.tokens == int(encoded["attention_mask"].sum())


def test_text_of_a_file(run: Run, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(
        "\n".join(["The old bridge", "", "   ", "He sold the farm ."] * 5), encoding="utf-8"
    )
    found = diagnosed(run, folders["bert"], "--text", "lines.txt", "--batch-size", 4)
    assert (found.sequences, found.batches) == (10, 3)
    assert found.data == "10 texts of lines.txt, at most 40 tokens each"
    found = diagnosed(run, folders["bert"], "--text", "lines.txt", "--batch-size", 4, "--max-batches", 2)
    assert found.sequences == 8


def test_max_length(run: Run, folders: Folders) -> None:
    assert diagnosed(run, folders["bert"], "--max-length", 5).tokens == 600
    result = run("diagnose", folders["bert"], "--max-length", 41)
    assert result.exit_code == 2
    assert "from 1 to 40" in result.stderr


def test_a_decoder_without_padding_token(run: Run, folders: Folders) -> None:
    found = diagnosed(run, folders["gpt2"], "--max-batches", 1)
    encode = load_tokenizer(Origin(str(folders["gpt2"])))
    assert encode.pad_token == "</s>"
    assert encode.padding_side == "right"
    assert found.layers[-1].name == "final"


def test_both_towers_of_clip(run: Run, folders: Folders, pictures: Path) -> None:
    both = diagnosed(run, folders["clip"])
    assert [each.model for each in (both, *both.others)] == ["clip text_model", "clip vision_model"]
    result = run("diagnose", folders["clip"], "--images", pictures, "--out", "clip", "--fail-on-collapse")
    assert "text_model is left out: clip reads text, so --images does not fit" in result.stderr
    assert Diagnosis.load("clip/diagnosis.json").model == "clip vision_model"
    result = run("diagnose", folders["clip"], "--graph", "karate")
    assert (result.exit_code, result.stdout) == (2, "")
    found = diagnosed(run, folders["clip"], "--part", "vision_model", "--images", pictures)
    assert (found.model, found.sequences, found.tokens) == ("clip vision_model", 6, 6 * 16)
    assert found.data == f"the images of {pictures.name}"
    assert diagnosed(run, folders["clip"], "--part", "text_model").sequences == 120
    result = run("diagnose", folders["clip"], "--part", "text_model", "--images", pictures)
    assert result.exit_code == 2
    assert "reads text, so --images does not fit" in result.stderr


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_an_encoder_and_its_decoder(run: Run, folders: Folders, part: str) -> None:
    found = diagnosed(run, folders["t5"], "--part", part, "--max-batches", 1)
    assert [layer.name for layer in found.layers][:3] == ["embed", "block 0", "block 1"]
    both = diagnosed(run, folders["t5"], "--max-batches", 1)
    alone = {each.model.split()[-1]: each for each in (both, *both.others)}[part]
    assert alone.layers == found.layers  # one pass measures both


def test_images_of_a_folder(run: Run, folders: Folders, pictures: Path) -> None:
    result = run("diagnose", folders["vit"], "--images", pictures, "--json", "--no-baseline", "--batch-size", 4)
    assert result.stderr == "Skipped because they are not readable images: broken.png (1 in total).\n"
    found = Diagnosis.from_json(result.stdout)
    assert (found.sequences, found.batches, found.tokens) == (6, 2, 6 * 16)
    with_prefix = diagnosed(run, folders["vit"], "--images", pictures, "--tokens", "all")
    assert with_prefix.tokens == 6 * 17


def test_random_weights_are_others(run: Run, folders: Folders) -> None:
    saved, random = (load_model(str(folders["bert"]), random_weights=r) for r in (False, True))
    again = load_model(str(folders["bert"]), random_weights=True)
    assert (saved.name, random.name) == ("bert", "bert (random weights)")
    keys = "encoder.layer.0.attention.self.query.weight"
    weights = [loaded.model.get_parameter(keys) for loaded in (saved, random, again)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


def test_loading_leaves_the_random_state_alone(folders: Folders) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(str(folders["bert"]), random_weights=True)
    assert torch.equal(torch.rand(3), expected)


def test_dtype(folders: Folders, run: Run, pictures: Path) -> None:
    assert load_model(str(folders["bert"]), dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_model(str(folders["bert"])).model.dtype == torch.float32
    assert diagnosed(run, folders["vit"], "--images", pictures, "--dtype", "float64").sequences == 6


def test_a_checkpoint_replaces_the_weights(folders: Folders, tmp_path: Path) -> None:
    random = load_model(str(folders["bert"]), random_weights=True).model
    torch.save({"model": random.state_dict()}, tmp_path / "weights.pt")
    loaded = load_model(str(folders["bert"]), checkpoint=tmp_path / "weights.pt").model
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), random.parameters(), strict=True))


def test_missing_weights_are_told(run: Run, folders: Folders, tmp_path: Path) -> None:
    from transformers import BertModel

    model = BertModel.from_pretrained(folders["bert"])
    model.save_pretrained(
        tmp_path / "part", state_dict={k: v for k, v in model.state_dict().items() if "layer.1.output" not in k}
    )
    load_tokenizer(Origin(str(folders["bert"]))).save_pretrained(tmp_path / "part")
    result = run("diagnose", "part", "--json", "--no-baseline", "--max-batches", 1)
    assert result.exit_code == 0, result.stderr
    assert "4 weights are missing in the files and are random: encoder.layer.1.output" in result.stderr


@pytest.mark.parametrize(("strange", "certainty"), [(0, None), (1, "medium"), (4, "low")])
def test_unknown_tokens_are_a_doubt(run: Run, folders: Folders, tmp_path: Path, strange: int, certainty: Any) -> None:
    """Of nine words in each text some are unknown: 0, 11 or 44 %."""
    known = " ".join(built_in_sentences()).replace(".", " ").split()
    lines = [" ".join([*known[9 * n : 9 * n + 9 - strange], *["qzxv"] * strange]) for n in range(40)]
    (tmp_path / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    result = run("diagnose", folders["bert"], "--text", "texts.txt", "--json", "--no-baseline")
    assert result.exit_code == 0, result.stderr
    verdict = json.loads(result.stdout)["verdict"]
    doubts = [text for text in verdict["cautions"] if "does not know" in text]
    assert len(doubts) == (certainty is not None)
    if certainty is not None:
        assert f"{strange / 9:.0%}" in doubts[0]
        assert verdict["certainty"] in (certainty, "low")


def test_what_cannot_be_loaded(run: Run, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    custom = {"model_type": "made_up", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    unknown = {"model_type": "made_up"}
    for name, config in {"custom": custom, "unknown": unknown}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "custom" / "code.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    for file in ("config.json", "model.safetensors"):  # transformers then makes a tokenizer without any words
        (tmp_path / "wordless").mkdir(exist_ok=True)
        shutil.copy(folders["gpt2"] / file, tmp_path / "wordless")
    expected = {
        "wordless": "has no tokenizer",
        "empty": "no config.json",
        "custom": "needs its own code",
        "unknown": "cannot be loaded",
        folders["no_tokenizer"]: "does not know",
        folders["bert"] / "model.safetensors": "--checkpoint",
    }
    for name, words in expected.items():
        result = run("diagnose", name, "--json")
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert words in result.stderr


def test_a_gguf_file_is_found_by_its_name_and_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    for place in (tmp_path, tmp_path / "small.gguf"):
        origin = Origin(str(place))
        assert origin.place == str(tmp_path)
        assert origin.options == {"trust_remote_code": False, "gguf_file": "small.gguf"}


def test_a_gguf_file_that_is_not_there_is_a_file_and_no_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("diagnose", "smal.gguf", "--preset", "decoder")
    assert (result.exit_code, result.stderr) == (2, "Error: There is no file smal.gguf.\n")


def test_libraries_speak_again_afterwards() -> None:
    import transformers

    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with suppress(KeyError), silence_libraries(transformers):
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
        raise KeyError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_preset_for_decoders_and_settings_that_win(folders, run) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(run("diagnose", folders["gpt2"], "--preset", "decoder", "--json").stdout)
    assert found["settings"]["baseline_batches"] == 0
    assert "at most 64 tokens" in found["data"], "what the model can read"
    assert found["batches"] == 30
    assert "massive_activation" in found["layers"][1]["measures"]
    other = run("diagnose", folders["gpt2"], "--preset", "decoder", "--batch-size", 60, "--baseline", "--json")
    facts = json.loads(other.stdout)
    assert (facts["batches"], facts["settings"]["baseline_batches"]) == (2, 1)
