"""Errors that suggest what was meant, what to install, and which file is damaged."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.cli.options import PLACES
from uncollapse.errors import MissingLibraryError, UsageError, did_you_mean, file_errors, import_optional, similar_file

SOURCE = Path(uc.__file__).parent


@pytest.mark.parametrize(
    ("name", "names", "most", "question"),
    [
        ("contranorm", ["pair_norm", "contra_norm"], 1, " Did you mean 'contra_norm'?"),
        ("CONTRA-NORM", ["pair_norm", "contra_norm"], 1, " Did you mean 'contra_norm'?"),
        ("cosine", ["effective_rank", "mean_cosine"], 1, " Did you mean 'mean_cosine'?"),
        ("ab", ["absolute", "cabinet"], 1, ""),
        ("norm", ["norm1", "my_norms", "xyz"], 3, " Did you mean 'norm1' or 'my_norms'?"),
        ("a", ["bart", "cart"], 1, ""),
        ("xyzzy", ["pair_norm", "contra_norm"], 1, ""),
        ("", ["pair_norm"], 1, ""),
        (7, [70, "none"], 1, " Did you mean '70'?"),
        ("x", [], 1, ""),
    ],
)
def test_the_closest_names(name: object, names: list[object], most: int, question: str) -> None:
    assert did_you_mean(name, names, most) == question


def test_a_missing_file_asks_for_the_closest_one_in_its_folder(tmp_path: Path) -> None:
    for name in ("first.npy", "frist.py"):
        (tmp_path / name).touch()
    assert similar_file(tmp_path / "frist.npy") == " Did you mean 'first.npy'?"
    assert similar_file(tmp_path / "xyzzy") == similar_file(tmp_path / "no folder" / "frist.npy") == ""


def test_errors_is_the_only_module_that_guesses() -> None:
    guessing = [path.name for path in SOURCE.rglob("*.py") if "get_close_matches" in path.read_text(encoding="utf-8")]
    assert guessing == ["errors.py"]


def test_import_optional_names_the_extra_of_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_optional("json", "none").__name__ == "json"
    with pytest.raises(MissingLibraryError, match=r"^no_such_library is required: .*uncollapse\[text\]"):
        import_optional("no_such_library.part", "text")
    (tmp_path / "broken_library.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):  # of a library that is there: not ours to explain
        import_optional("broken_library", "text")


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (KeyError("x"), "valid .npz"),
        (MemoryError(), "memory"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be read: Permission denied"),
        (UsageError("own words"), "^own words$"),
    ],
)
def test_file_errors_name_the_file(error: Exception, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught, file_errors(Path("a.npz"), ".npz file"):
        raise error
    assert "a.npz" in str(caught.value) or caught.value is error


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
BATCHES = [torch.zeros(2, 4, 16)]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (lambda: uc.METRICS["efective_rank"], "effective_rank"),
        (lambda: uc.CURES["contranorm"], "contra_norm"),
        (lambda: uc.LOSSES["infonce"], "info_nce"),
        (lambda: uc.efective_rank, "effective_rank"),
        (lambda: uc.attach(ENCODER, "contranorm", scale=1.0), "contra_norm"),
        (lambda: uc.attach(ENCODER, "contra_norm", scael=1.0), "scale"),
        (lambda: uc.attach(ENCODER, "contra_norm", scale=1.0, at="attention.residal"), "attention.residual"),
        (lambda: uc.attach(ENCODER, "contra_norm", scale=1.0, preset="gn"), "gnn"),
        (lambda: uc.ContraNorm.preset("brt", 16, 1.0), "bert"),
        (lambda: uc.diagnose(ENCODER, BATCHES, at=["mlp.residal"]), "mlp.residual"),
        (lambda: uc.diagnose(ENCODER, BATCHES, modules=["layer.0"]), "layers.0"),
        (lambda: uc.diagnose(ENCODER, BATCHES, modules=["layers.*"], layout="token"), "tokens"),
        (lambda: uc.Rule("efective_rank", above=1.0), "effective_rank"),
        (lambda: uc.Monitor(BATCHES, measures=("mean_cosin",)), "mean_cosine"),
    ],
)
def test_errors_of_the_library_ask(wrong: object, meant: str) -> None:
    with pytest.raises((KeyError, ValueError, AttributeError), match=f"mean '{meant}'"):
        wrong()  # type: ignore[operator]


def test_errors_of_recipes_ask() -> None:
    from uncollapse.lab.config.fields import build
    from uncollapse.lab.recipe import RECIPES

    recipe = RECIPES["gcn-depth"]
    for wrong, meant in (
        (lambda: recipe.grid("tabel3"), "table3"),
        (lambda: build(recipe.config, {"layer": 2}), "layers"),
        (lambda: build(recipe.config, {"norm": "pairnorm"}), "pair_norm"),
    ):
        with pytest.raises(UsageError, match=f"mean '{meant}'"):
            wrong()
    with pytest.raises(KeyError, match="mean 'gcn-depth'"):
        RECIPES["gcn_depht"]


def test_the_places_that_are_completed_are_those_there_are() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True, norm_first=True), 1)
    named = {place for model in (ENCODER, decoder) for place in uc.places(model)}
    assert named - {"final.norm", "final.norm.input"} <= set(PLACES)
    assert {"cross.residual", "mlp.norm.input", "block"} <= named
