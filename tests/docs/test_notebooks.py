"""The notebooks run, cell by cell, in an empty folder; what they claim they assert themselves."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()  # before a notebook imports transformers
FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("diagnose_bert", "judge_embeddings", "mend_deep_gcn", "train_on_the_sphere")
LIBRARIES = {
    "diagnose_bert": ("transformers",),
    "judge_embeddings": ("sklearn",),
    "mend_deep_gcn": ("torch_geometric",),
    "train_on_the_sphere": ("sklearn",),
}


def cells(path: Path) -> Iterator[tuple[str, int, str]]:
    """The kind of each cell, its first line's number, and its text."""
    lines = path.read_text(encoding="utf-8").split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("# %%")] + [len(lines)]
    assert starts[0] == 0
    for start, end in itertools.pairwise(starts):
        kind = "markdown" if "[markdown]" in lines[start] else "code"
        yield kind, start + 1, "\n".join(lines[start + 1 : end])


def test_all_are_here() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.py"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_its_answer_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (*LIBRARIES[name], "matplotlib"):
        pytest.importorskip(library)
    import matplotlib.pyplot as plt

    shown: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    plt.switch_backend("Agg")
    threads, variables = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        for kind, line, text in cells(FOLDER / f"{name}.py"):
            if kind == "code":
                exec(compile("\n" * line + text, f"{name}.py", "exec"), variables)
    finally:
        torch.set_num_threads(threads)
        plt.close("all")
    assert shown


@pytest.mark.parametrize("name", NAMES)
def test_it_tells_a_story(name: str) -> None:
    """A title, a question, what to install, code, and an answer that the code checks."""
    found = list(cells(FOLDER / f"{name}.py"))
    words = "\n".join(text for kind, _, text in found if kind == "markdown")
    assert re.match(r"# # \w", found[0][2])
    assert re.search(r"^# > .*\?$", found[0][2], flags=re.M)
    assert "pip install -c constraints.txt -e '.[" in found[0][2]
    assert "# ## The answer" in words
    assert all(not line or line.startswith("#") for line in words.split("\n"))
    assert any("assert " in text for kind, _, text in found if kind == "code")
