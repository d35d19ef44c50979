"""Functions by name."""

from pathlib import Path

import pytest

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.models import import_function


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # so that sys.path is restored
    (tmp_path / "neighbour_of_builder.py").write_text("ANSWER = 42", encoding="utf-8")
    (tmp_path / "math.py").write_text(
        "from neighbour_of_builder import ANSWER\ndef build():\n    return ANSWER", encoding="utf-8"
    )
    assert import_function(f"{tmp_path / 'math.py'}:build")() == 42  # though a module of this name is loaded
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_here.py").write_text("def build():\n    return 1", encoding="utf-8")
    assert import_function("module_here:build")() == 1
    assert import_function("collections.abc:Sized") is not None


def test_a_missing_import_of_the_module_is_not_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_other.py").write_text("import no_such_library", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_function("needs_other:build")


@pytest.mark.parametrize("spec", ["module", "module:", ":name", "no.such.module:name", "none.py:name", "json:nothing"])
def test_what_names_no_function(spec: str) -> None:
    with pytest.raises(UsageError):
        import_function(spec)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no file none\.py"):
        import_function("none.py")


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(UsageError, match=r"uncollapse\[data\]"):
        import_optional("no_such_library.part", "data")
