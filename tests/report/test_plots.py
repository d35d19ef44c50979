import re
import sys
from pathlib import Path

import pytest

from uncollapse import report

pytest.importorskip("matplotlib")
MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_measure_is_drawn_in_each_format(make, tmp_path: Path, suffix: str) -> None:
    diagnoses = [make("before", places=("attention.residual",)), make("after", 0.4)]
    path = report.plot(diagnoses, "effective_rank", tmp_path / f"x{suffix}")
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_spectrum_and_heatmap_are_drawn(make, tmp_path: Path) -> None:
    for draw in (report.plot_spectrum, report.plot_heatmap):
        for given in (make(), [make("a"), make("b", 0.3)]):
            path = draw(given, tmp_path / "x.png", layer="block 1")
            assert path.read_bytes().startswith(MAGIC[".png"])


def test_names_are_no_formulas(make, tmp_path: Path) -> None:
    hostile = make("$\\frac{", names=["$x_{", "_hidden", "block 1"], example=("$", "\\", "$\\x$", "a", "b", "c"))
    report.plot([hostile, make("_b")], "mean_cosine", tmp_path / "x.svg")
    report.plot_heatmap(hostile, tmp_path / "y.svg", layer="$x_{")
    report.plot_spectrum([hostile, make("_b")], tmp_path / "z.svg")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_logarithmic_measure_and_a_single_layer_are_drawn(make, tmp_path: Path) -> None:
    assert report.plot(make(), "token_variance", tmp_path / "x.png").exists()
    assert report.plot(make(names=["embeddings"], baseline=False), "uniformity", tmp_path / "y.png").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, p: report.plot(d, "nothing", p / "x.png"), "'nothing'.* mean_cosine"),
        (lambda d, p: report.plot(d, "alignment", p / "x.png"), "not taken"),
        (lambda d, p: report.plot(d, "mean_cosine", p / "x.gif"), "x.gif"),
        (lambda d, p: report.plot_heatmap(d, p / "x.png", layer="block 9"), "embed, block 0"),
        (lambda d, p: report.plot([], "mean_cosine", p / "x.png"), "at least one"),
    ],
)
def test_errors_say_what_there_is(make, tmp_path: Path, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape('pip install "uncollapse[report]"')):
        report.plot(make(), "mean_cosine", tmp_path / "x.png")
