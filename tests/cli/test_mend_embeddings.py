"""uncollapse embeddings --mend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import Result

import uncollapse as uc
from uncollapse.io import embedding_files, embedding_rows

Run = Callable[..., Result]


@pytest.fixture
def files(run: Run, tmp_path: Path) -> torch.Tensor:
    """alike.npy has rows that share a direction, apart.npy has not."""
    x = torch.randn(3000, 20, generator=torch.Generator().manual_seed(0))
    numpy.save(tmp_path / "apart.npy", x.numpy())
    numpy.save(tmp_path / "alike.npy", (x + 2).numpy())
    return x


def test_alike_rows_are_mended_and_both_are_compared(run: Run, files: torch.Tensor, tmp_path: Path) -> None:
    result = run("embeddings", "alike.npy", "--mend", "auto", "--out", "new.npy")
    assert result.exit_code == 0, result.output
    assert "all_but_the_top was applied" in " ".join(result.stdout.split())
    new = torch.from_numpy(numpy.load(tmp_path / "new.npy"))
    expected = uc.EmbeddingTransform("all_but_the_top", k=1).fit(files + 2).transform(files + 2)
    torch.testing.assert_close(new, expected, rtol=1e-4, atol=1e-4)
    page = (tmp_path / "new.html").read_text(encoding="utf-8")
    assert "all_but_the_top was applied, because the mean cosine" in page
    assert "different data" not in page
    assert '"noun":"row"' in page.replace('": "', '":"')


def test_the_numbers_before_and_after_have_as_many_decimals(run: Run, files: torch.Tensor) -> None:
    shown = run("embeddings", "alike.npy", "--mend", "auto", "--out", "new.npy").stdout
    rows = {line[: -len("before after") - 10].strip(): line.split()[-2:] for line in shown.splitlines()}
    cosine, gap = (next(rows[name] for name in rows if name.startswith(start)) for start in ("mean c", "uniformity g"))
    assert [len(text.partition(".")[2]) for text in cosine] == [3, 3]
    assert "-0.000" not in cosine
    assert len(gap) == 2


def test_a_misspelt_method_is_named_before_the_missing_file(run: Run, files: torch.Tensor) -> None:
    result = run("embeddings", "alike.npy", "--mend", "atuo")
    assert result.exit_code == 2
    assert "Did you mean 'auto'?" in result.stderr


def test_rows_that_are_not_alike_are_left_alone(run: Run, files: torch.Tensor, tmp_path: Path) -> None:
    for method in ("auto", "whiten"):
        result = run("embeddings", "apart.npy", "--mend", method, "--out", "new.npy")
        assert result.exit_code == 0
        assert "Leave these embeddings as they are" in " ".join(result.stdout.split())
        assert not (tmp_path / "new.npy").exists()
    forced = run("embeddings", "apart.npy", "--mend", "whiten", "--out", "new.npy", "--force", "--json")
    found = json.loads(forced.stdout)
    assert (found["method"], found["advice"], Path(found["written"]).name) == ("whiten", "none", "new.npy")
    assert found["measures"][1]["effective_rank"] > 15


def test_a_dry_run_only_advises(run: Run, files: torch.Tensor, tmp_path: Path) -> None:
    result = run("embeddings", "alike.npy", "--mend", "auto", "--dry-run")
    assert "is advised" in " ".join(result.stdout.split())
    assert not list(tmp_path.glob("*.html"))
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_a_method_that_is_not_advised_is_not_called_advised(run: Run, files: torch.Tensor) -> None:
    for method in ("pca:2", "whiten", "all_but_the_top:7"):
        dry = " ".join(run("embeddings", "alike.npy", "--mend", method, "--dry-run").stdout.split())
        name = method.partition(":")[0]
        assert f"{name} would be applied as asked for. The advice is all_but_the_top, because" in dry
        done = " ".join(run("embeddings", "alike.npy", "--mend", method, "--out", f"{name}.npy").stdout.split())
        assert f"{name} was applied as asked for. The advice is all_but_the_top, because" in done


@pytest.mark.parametrize(
    ("stage", "there"), [("partial_fit", b"old"), ("transform", b"old"), ("open_rows", b"\x93NUMPY")]
)
def test_ctrl_c_leaves_the_old_file_or_the_whole_new_one(
    run: Run, files: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, there: bytes
) -> None:
    calls = []

    def interrupt_second(*given: Any) -> Any:  # in the middle: of the fit, of the new file, or before it is read again
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*given)

    owner = embedding_files if stage == "open_rows" else uc.EmbeddingTransform
    original = getattr(owner, stage)
    monkeypatch.setattr(owner, stage, interrupt_second)
    monkeypatch.setattr(embedding_rows, "PART", 1000)
    (tmp_path / "new.npy").write_bytes(b"old")
    result = run("embeddings", "alike.npy", "--mend", "auto", "--out", "new.npy")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("Interrupted.\n")
    assert ("new.npy is complete" in result.stderr) == (there != b"old")
    assert (tmp_path / "new.npy").read_bytes().startswith(there)
    assert {path.name for path in tmp_path.glob("*new*")} == {"new.npy"}
    assert not list(tmp_path.glob("*.part"))


def test_numbers_after_a_method(run: Run, files: torch.Tensor, tmp_path: Path) -> None:
    assert run("embeddings", "alike.npy", "--mend", "pca:4", "--out", "new.npy").exit_code == 0
    assert numpy.load(tmp_path / "new.npy").shape == (3000, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mend", "auto"], "--out"),
        (["--mend", "wihten", "--out", "new.npy"], "whiten"),
        (["--mend", "center:3", "--out", "new.npy"], "number"),
        (["--mend", "pca:x", "--out", "new.npy"], "number"),
        (["--mend", "auto", "--out", "new.npz"], "kind"),
        (["--mend", "auto", "--out", "alike.npy"], "another name"),
        (["--dry-run"], "--mend"),
        (["--mend", "auto", "--dry-run", "--pairs", "apart.npy"], "--pairs"),
        (["--mend", "auto", "--dry-run", "--fail-on-collapse"], "--fail-on-collapse"),
        (["--mend", "pca", "--dry-run"], "dims"),
        (["--mend", "pca:21", "--dry-run"], "from 1 to 20"),
        (["--mend", "all_but_the_top:0", "--dry-run"], "from 1 to 19"),
        (["--mend", "whiten:2", "--dry-run"], "from 0 to 1"),
    ],
)
def test_what_cannot_be_done(run: Run, files: torch.Tensor, words: list[str], said: str) -> None:
    result = run("embeddings", "alike.npy", *words)
    assert result.exit_code == 2
    assert said in result.output
