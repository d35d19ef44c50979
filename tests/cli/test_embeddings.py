"""uncollapse embeddings."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console
from tests.distributed import finish, start
from typer.testing import Result

import uncollapse as uc
from uncollapse.diagnosis.result import Diagnosis, Layer

Run = Callable[..., Result]


@pytest.fixture
def rows(run: Run, tmp_path: Path) -> torch.Tensor:
    x = torch.randn(5000, 24, generator=torch.Generator().manual_seed(0))
    numpy.save(tmp_path / "x.npy", x.numpy())
    return x


def test_numbers_are_those_of_the_rows_in_memory(run: Run, rows: torch.Tensor) -> None:
    result = run("embeddings", "x.npy", "--json")
    expected = uc.diagnose_rows(rows.split(4096), labels=uc.Labels("x"))
    assert Diagnosis.from_json(result.stdout).layers == expected.layers
    whole = uc.effective_rank(rows.double(), center=True)
    assert expected.layers[0]["dataset_rank"] == pytest.approx(float(whole), rel=1e-9)


def test_pairs_give_alignment(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    second = rows + 0.1 * rows.flip(1)
    numpy.save(tmp_path / "y.npy", second.numpy())
    layer = Diagnosis.from_json(run("embeddings", "x.npy", "--pairs", "y.npy", "--json").stdout).layers[0]
    unit = torch.nn.functional.normalize
    expected = (unit(rows.double()) - unit(second.double())).square().sum(-1).mean()
    assert layer["alignment"] == pytest.approx(float(expected), rel=1e-6)


def test_pairs_may_be_another_column_or_a_file_without_names(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    second = rows.flip(0)
    numpy.save(tmp_path / "y.npy", second.numpy())
    numpy.savez(tmp_path / "both.npz", one=rows.numpy(), two=second.numpy())

    def alignment(*given: str) -> float:
        return Diagnosis.from_json(run("embeddings", *given, "--json").stdout).layers[0]["alignment"]

    expected = alignment("x.npy", "--pairs", "y.npy")
    assert alignment("both.npz", "--key", "one", "--pairs", "both.npz", "--pairs-key", "two") == expected
    assert alignment("both.npz", "--key", "one", "--pairs", "y.npy") == expected
    assert alignment("x.npy", "--pairs", "both.npz", "--pairs-key", "two") == expected
    for given in (["--pairs-key", "two"], ["--pairs", "y.npy", "--pairs-key", "two"]):
        result = run("embeddings", "x.npy", *given)
        assert result.exit_code == 2
        assert "--pairs" in result.stderr or "no name" in result.stderr


def test_both_numbers_are_told_with_their_intervals(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    numpy.save(tmp_path / "y.npy", (rows + 0.1 * rows.flip(1)).numpy())
    told = run("embeddings", "x.npy", "--pairs", "y.npy", "--level", "0.9", "--draws", "50", "--t", "3").stdout
    assert re.search(r" · Alignment 0\.\d+ \(90 %: 0\.\d+ to 0\.\d+\) over 5,000 pairs", told)
    assert re.search(r" · Uniformity −\d\.\d+ \(90 %: −\S+ to −\S+\), .* of 24 dimensions, .* rows, with t = 3\.", told)
    page = (tmp_path / "uncollapse-x" / "report.html").read_text()
    assert "Uniformity gap" in page
    assert page.count("90 %: −") >= 2


def test_options_change_what_is_measured(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    numpy.save(tmp_path / "y.npy", rows.flip(0).numpy())

    def layer(*options: str) -> Layer:
        return Diagnosis.from_json(run("embeddings", "x.npy", "--pairs", "y.npy", "--json", *options).stdout).layers[0]

    usual, other = layer("--draws", "50"), layer("--draws", "0", "--t", "1", "--alpha", "1")
    assert (set(usual.intervals), set(other.intervals)) == ({"uniformity", "alignment"}, set())
    assert usual["uniformity"] < -3 < -1.5 > other["uniformity"]
    assert other["alignment"] == pytest.approx(1.4, abs=0.05)  # the distance of two unrelated rows
    assert usual["alignment"] == pytest.approx(2, abs=0.05)


def test_without_pairs_it_is_said_what_is_missing(run: Run, rows: torch.Tensor) -> None:
    assert "Alignment was not measured: it needs a second view" in run("embeddings", "x.npy", "--draws", "0").stdout


def test_a_narrow_terminal_shows_all_of_the_table(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    numpy.save(tmp_path / "y.npy", rows.numpy())
    told = run("embeddings", "x.npy", "--pairs", "y.npy", "--draws", "0", "--json").stdout
    console = Console(width=60, file=io.StringIO())
    console.print(Diagnosis.from_json(told).table())
    table = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in table
    for name in ("robust cosine", "dataset rank share", "uniformity", "alignment"):
        assert re.search(rf"^ +{name} +-?\d", table, re.MULTILINE), name


def test_a_folder_of_files(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for number, part in enumerate(rows.split(1700)):
        numpy.save(tmp_path / "parts" / f"{number}.npy", part.numpy())
    whole, parts = (Diagnosis.from_json(run("embeddings", x, "--json").stdout) for x in ("x.npy", "parts"))
    assert parts.data == "parts, 3 files: 5,000 rows"
    for name, found in whole.layers[0].measures.items():
        assert parts.layers[0][name] == pytest.approx(found.mean, rel=1e-9), name


def in_two_processes(*arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of both processes."""
    started, store = start(2, "-m", "uncollapse", "embeddings", *arguments, "--json")
    found = finish(started)
    del store  # which they met in
    return found


def test_two_processes_read_a_share_each_and_the_first_tells(rows: torch.Tensor, tmp_path: Path) -> None:
    y = rows + 0.1 * rows.flip(1)
    numpy.save(tmp_path / "y.npy", y.numpy())
    (code, told, _), other = in_two_processes("x.npy", "--pairs", "y.npy")
    assert (code, other[:2]) == (0, (0, ""))
    found, expected = Diagnosis.from_json(told), uc.diagnose_rows([rows], pairs=[y]).layers[0]
    assert found.tokens == 5000
    for name in ("mean_cosine", "effective_rank", "dataset_rank", "feature_correlation", "alignment"):
        assert found.layers[0][name] == pytest.approx(expected[name], rel=1e-12), name
    assert found.layers[0]["uniformity"] == pytest.approx(expected["uniformity"], rel=0.05)


def test_when_one_process_cannot_read_its_share_both_stop(rows: torch.Tensor, tmp_path: Path) -> None:
    rows[4321, 7] = torch.nan
    numpy.save(tmp_path / "x.npy", rows.numpy())
    first, second = in_two_processes("x.npy")
    assert (first[0] != 0, second[0], first[1] + second[1]) == (True, 2, "")
    assert (first[2] + second[2]).count("row 4321 has NaN") == 1
    assert "Traceback" not in first[2] + second[2]


@pytest.mark.parametrize(
    "option", [("--level", "95"), ("--draws", "-1"), ("--draws", "39"), ("--t", "0"), ("--alpha", "inf")]
)
def test_bad_options(run: Run, rows: torch.Tensor, option: tuple[str, str]) -> None:
    result = run("embeddings", "x.npy", *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option[0].strip("-") in result.stderr


def test_files_and_exit_code(run: Run, tmp_path: Path) -> None:
    numpy.save(tmp_path / "flat.npy", numpy.random.default_rng(0).normal(size=(2000, 2)) @ numpy.ones((2, 64)))
    result = run("embeddings", "flat.npy", "--fail-on-collapse")
    assert result.exit_code == 3
    assert result.stdout.endswith("Written: uncollapse-flat/diagnosis.json\nWritten: uncollapse-flat/report.html\n")
    assert Diagnosis.load(tmp_path / "uncollapse-flat" / "diagnosis.json").verdict.kind == "dimensional"


def test_pairs_of_another_shape(run: Run, rows: torch.Tensor, tmp_path: Path) -> None:
    numpy.save(tmp_path / "y.npy", rows[1:].numpy())
    result = run("embeddings", "x.npy", "--pairs", "y.npy")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "(5000, 24), got (4999, 24)" in result.stderr


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The largest memory while 400 MB are read is near that of 2 MB."""
    for name, count in {"small": 4096, "large": 800_000}.items():
        numpy.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype="float32", shape=(count, 128))
    program = """
import resource, sys
from pathlib import Path
from uncollapse.io.embedding_files import open_rows
for name in ("small", "large"):
    total = sum(len(part) for part in open_rows(Path(name + ".npy")).parts())
    print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    (_, small), (count, large) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert count == 800_000
    assert large - small < 40_000  # KiB


def test_what_cannot_be_measured_is_bad_usage(run: Run, tmp_path: Path) -> None:
    numpy.save(tmp_path / "one.npy", numpy.ones((1, 8)))
    result = run("embeddings", "one.npy", "--json")
    assert result.exit_code == 2
    assert "at least two" in result.stderr
