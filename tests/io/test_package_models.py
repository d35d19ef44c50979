"""package:NAME/FOLDER: a model in an installed package."""

import sys
from pathlib import Path
from shutil import copytree
from types import ModuleType

import pytest

from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_classifier, load_tokenizer

NAME = "a_package_with_a_model"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> Path:
    """An installed package whose code must not run, with a model in it."""
    here = tmp_path / "site" / NAME
    copytree(folders["bert"], here / "models" / "tiny")
    (here / "__init__.py").write_text("raise AssertionError('the package was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return here


def test_its_model_and_tokenizer(package: Path) -> None:
    origin = Origin(f"package:{NAME}/models/tiny")
    assert Path(origin.place) == package / "models" / "tiny"
    assert load_classifier(origin, 3).config.num_labels == 3
    assert load_tokenizer(origin)("a film")["input_ids"]
    assert NAME not in sys.modules


def test_the_name_by_which_it_is_installed(package: Path) -> None:
    name = NAME.replace("_", "-")
    (package / "models" / "tiny" / "1_Pooling").mkdir()
    (package / "models" / "tiny" / "1_Pooling" / "config.json").write_text("{}", encoding="utf-8")
    assert Path(Origin(f"package:{name}/models/tiny").place) == package / "models" / "tiny"
    for place in (name, f"{name}/models", f"{name}/model"):
        with pytest.raises(UsageError, match=rf"Name a model in it: package:{name}/models/tiny\."):
            Origin(f"package:{place}")


def test_a_package_without_code(package: Path) -> None:
    (package / "__init__.py").unlink()
    assert Path(Origin(f"package:{NAME}/models/tiny").place) == package / "models" / "tiny"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("package:no_such_package/model", "no package 'no_such_package' is installed; write package:NAME/FOLDER"),
        ("package:", "no package '' is installed"),
        ("package:/models", "no package '' is installed"),
        ("package:a.b/model", "no package 'a.b' is installed"),
        ("package:token/model", "no package 'token' is installed"),  # a module of one file has no folders
        (f"package:{NAME}/model", f"the package {NAME} has no folder 'model'"),
        (f"package:{NAME}/__init__.py", "has no folder '__init__.py'"),
        (f"package:{NAME}/models", "no config.json"),
        (f"package:{NAME}", "no config.json"),
    ],
)
def test_what_is_not_there(package: Path, place: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Origin(place)


def test_a_module_that_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))  # as a script that runs is
    with pytest.raises(UsageError, match="made_here"):
        Origin("package:made_here/model")
