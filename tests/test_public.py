"""The public names: complete, typed, never hidden by a module, and imported only when used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import uncollapse as uc

SOURCE = Path(uc.__file__).parent


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} | {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert modules & set(uc.__all__) == {"cures", "losses", "metrics", "pairwise"}


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(uc.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {(node.module, alias.name) for node in imports for alias in node.names if alias.name != "*"}
    families = {f"uncollapse.{family}" for family in ("cures", "losses", "metrics")}
    assert {node.module for node in imports if node.names[0].name == "*"} == families
    listed = {(module, name) for module, names in uc._PUBLIC.items() for name in names.split()}
    assert typed == {each for each in listed if each[0] not in families and each[1] != "__version__"}


@pytest.mark.parametrize("family", ["cures", "losses", "metrics"])
def test_a_family_is_public_as_a_whole(family: str) -> None:
    assert sorted(getattr(uc, family).__all__) == sorted(uc._PUBLIC[f"uncollapse.{family}"].split())


@pytest.mark.parametrize("name", uc.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(uc, name)
    if callable(thing) or hasattr(thing, "__path__"):
        assert thing.__doc__


def test_names_are_there_however_the_package_is_imported(tmp_path: Path) -> None:
    code = """
import sys
import uncollapse as uc
assert set(uc.__all__) <= set(dir(uc))
assert "torch" not in sys.modules
from uncollapse.registry import METRICS
from uncollapse import *
assert "effective_rank" in METRICS
assert uc.effective_rank is effective_rank is METRICS["effective_rank"].function
assert not hasattr(uc, "__wrapped__")
assert uc.backbones.__name__ == "uncollapse.backbones"
print(uc.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{uc.__version__}\n", "")


def test_a_misspelt_name_gets_one_suggestion() -> None:
    code = "import uncollapse as uc; uc.diagnoze"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.count("Did you mean") == 1, done.stderr
    assert done.stderr.rstrip().endswith("has no attribute 'diagnoze'. Did you mean 'diagnose'?")


def test_type_checkers_report_a_misspelt_name(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    code = "import uncollapse as uc\nuc.diagnose, uc.Plan, uc.contra_norm, uc.info_nce, uc.rankme\nuc.diagnoze\n"
    (tmp_path / "user.py").write_text(code, encoding="utf-8")
    seen = [SOURCE / "__init__.py", *(SOURCE / family / "__init__.py" for family in ("cures", "losses", "metrics"))]
    options = ["--follow-imports=skip", "--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary"]
    output, errors, _ = api.run([*options, *map(str, seen), str(tmp_path / "user.py")])
    mistakes = [line for line in output.splitlines() if "user.py" in line]
    assert errors == ""
    assert len(mistakes) == 1, output
    assert 'user.py:3: error: Module has no attribute "diagnoze"' in mistakes[0]
