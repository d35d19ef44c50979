"""uncollapse diagnose on models that the user's own file builds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from uncollapse.diagnosis.result import Diagnosis

Run = Callable[..., Result]
ENCODER = ("diagnose", "models.py:encoder", "--batches", "models.py:batches")


def test_table_verdict_and_files(run: Run, tmp_path: Path) -> None:
    result = run(*ENCODER)
    assert result.exit_code == 0, result.stderr
    written = Diagnosis.load(tmp_path / "uncollapse-models.py-encoder" / "diagnosis.json")
    assert [layer.name for layer in written.layers] == ["embed", "block 0", "block 1"]
    assert all(f" {layer.name} " in result.stdout for layer in written.layers)
    assert written.verdict.sentence in result.stdout
    assert result.stdout.endswith(
        "Written: uncollapse-models.py-encoder/diagnosis.json\nWritten: uncollapse-models.py-encoder/report.html\n"
    )
    page = (tmp_path / "uncollapse-models.py-encoder" / "report.html").read_text(encoding="utf-8")
    assert written.verdict.sentence.partition(":")[0] in page


def test_json_is_all_there_is_on_stdout(run: Run, tmp_path: Path) -> None:
    result = run(*ENCODER, "--json", "--max-batches", 2, "--no-baseline", "--name", "mine")
    diagnosis = Diagnosis.from_json(result.stdout)
    assert (diagnosis.model, diagnosis.batches, diagnosis.baseline) == ("mine", 2, ())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("uncollapse")] == []


def test_a_wrong_choice_is_named_without_words_of_the_parser(run: Run) -> None:
    result = run(*ENCODER, "--layout", "rows")
    assert result.exit_code == 2
    assert "'rows' is not one of" in result.stderr
    assert "Value error" not in result.stderr


def test_json_with_out_writes_files_as_well(run: Run, tmp_path: Path) -> None:
    result = run(*ENCODER, "--json", "--out", "a/b")
    assert Diagnosis.from_json(result.stdout) == Diagnosis.load(tmp_path / "a" / "b" / "diagnosis.json")
    assert result.stderr == "Written: a/b/diagnosis.json\nWritten: a/b/report.html\n"


def test_the_same_command_gives_the_same_numbers(run: Run) -> None:
    first, second = (json.loads(run(*ENCODER, "--json").stdout) for _ in range(2))
    assert first["layers"] == second["layers"]
    assert first["verdict"] == second["verdict"]


def test_a_missing_report_library_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Path:
        raise ImportError('The report needs plotly: pip install "uncollapse[report]"')

    monkeypatch.setattr(Diagnosis, "report", missing)
    result = run(*ENCODER, "--out", "there")
    assert result.exit_code == 0
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["diagnosis.json"]
    assert result.stdout.endswith("Written: there/diagnosis.json\n")
    assert 'pip install "uncollapse[report]"' in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("model", "code"), [("unknown", 0), ("collapsed", 3)])
def test_fail_on_collapse(run: Run, model: str, code: int) -> None:
    arguments = ("diagnose", f"models:{model}", "--modules", "parts.*", "--batches", "models:batches", "--json")
    assert run(*arguments).exit_code == 0
    assert run(*arguments, "--fail-on-collapse").exit_code == code


def test_layers_by_name_and_pattern(run: Run) -> None:
    arguments = ("diagnose", "models.py:unknown", "--batches", "models.py:batches", "--json")
    result = run(*arguments, "--modules", "parts.0", "--modules", "parts.2")
    assert [layer.path for layer in Diagnosis.from_json(result.stdout).layers[1:]] == ["parts.0", "parts.2"]
    result = run(*arguments)
    assert result.exit_code == 2
    assert "--modules 'parts.*'" in result.stderr
    result = run(*arguments, "--modules", "blocks.*")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("layers", "expected"), [(["last"], ["block 1"]), (["-1", "embed"], ["embed", "block 1"]), (["0:1"], ["block 0"])]
)
def test_layers_are_selected_as_in_python(run: Run, layers: list[str], expected: list[str]) -> None:
    result = run(*ENCODER, "--json", *(word for entry in layers for word in ("--layers", entry)))
    assert [layer.name for layer in Diagnosis.from_json(result.stdout).layers] == expected
    result = run(*ENCODER, "--layers", "7")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_why_prints_and_stores_the_parts(run: Run) -> None:
    result = run(*ENCODER, "--why", "--no-baseline", "--out", "why")
    assert result.exit_code == 0, result.stderr
    found = Diagnosis.load("why/diagnosis.json")
    assert found.parts is not None
    assert {switch.name for switch in found.parts.switches} >= {"nothing", "no mixing", "MLP off", "residual doubled"}
    assert "residual doubled" in result.stdout
    assert "Not measured: gradients (there is no loss: pass batches with labels" in result.stdout
    assert run(*ENCODER, "--json", "--no-baseline").stdout.count('"parts": null') == 1


def test_places_and_attention(run: Run) -> None:
    result = run(*ENCODER, "--json", "--attention", "--at", "block", "--at", "attention.residual")
    layers = Diagnosis.from_json(result.stdout).layers
    assert {layer.place for layer in layers} == {"block", "attention.residual"}
    assert "attention_entropy" in layers[1].measures
    result = run(*ENCODER, "--at", "nowhere")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_weights_of_a_checkpoint_are_measured(run: Run, tmp_path: Path) -> None:
    from torch import nn

    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    weights = {f"module.{key}": 3 * tensor for key, tensor in plain.state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "model.pt")
    built = Diagnosis.from_json(run(*ENCODER, "--json").stdout)
    loaded = Diagnosis.from_json(run(*ENCODER, "--json", "--checkpoint", "model.pt").stdout)
    assert loaded.layers[0].measures == built.layers[0].measures
    assert loaded.layers[1]["token_variance"] > 2 * built.layers[1]["token_variance"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["diagnose", "models.py:encoder"], 2, "pass --batches module:function"),
        (["diagnose", "models.py:none"], 2, "has no function 'none'"),
        (["diagnose", "nowhere.py:none"], 2, "no file nowhere.py"),
        (["diagnose", "models.py"], 2, "'models.py' does not name a function; write module:function"),
        (["diagnose", "no_such_module:none"], 2, "no module 'no_such_module'"),
        (["diagnose", "models.py:no_model"], 2, "must return a torch.nn.Module, got str"),
        (["diagnose", "models.py:broken"], 1, "the builder broke"),
        (["diagnose", "no/such/folder"], 2, "no folder no/such/folder"),
        (["diagnose", "nobody/nothing"], 2, "cannot be reached"),
        (["diagnose", "models.py:encoder", "--batches", "models.py:one"], 2, "got int"),
        (["diagnose", "models.py:encoder", "--batches", "models.py:narrow_batches"], 1, "failed on batches of"),
        ([*ENCODER, "--text", "models.py"], 2, "--text and --batches exclude each other"),
        (["diagnose", "models.py:encoder", "--text", "no.txt"], 2, "no text file no.txt; --text takes a file"),
        (["diagnose", "models.py:encoder", "--images", "nowhere"], 2, "no folder nowhere"),
        (["diagnose", "models.py:encoder", "--graph", "amazon"], 2, "neither a known graph"),
        ([*ENCODER, "--checkpoint", "no.pt"], 2, "no checkpoint no.pt"),
        ([*ENCODER, "--random-weights"], 2, "leave out --random-weights"),
        ([*ENCODER, "--dtype", "int8"], 2, "choose one of float32"),
        ([*ENCODER, "--device", "abacus"], 2, "choose auto or one of"),
        ([*ENCODER, "--device", "cuda:97"], 2, "not available"),
        ([*ENCODER, "--out", "models.py"], 2, "--out takes a folder"),
        ([*ENCODER, "--part", "decoder"], 2, "decoder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(run: Run, arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
