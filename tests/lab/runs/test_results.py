"""One file a run: found again, never half-written, never taken for another."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lab.made_up import RECIPE, Config, result

from uncollapse.errors import UsageError
from uncollapse.io.files import write
from uncollapse.lab.config.fields import identity
from uncollapse.lab.runs.results import Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def saved(results: Results, config: Config) -> Path:
    return results.save(RECIPE, config, result(0.8) | {"config": asdict(config), "seed": config.seed})


def test_the_name_of_the_file(results: Results) -> None:
    config = Config(norm="contra", layers=16, seed=3)
    name = f"cora-contra-L16-seed3--{identity('made-up', config)}.json"
    assert results.path(RECIPE, config) == results.folder / "made-up" / name
    assert results.path(RECIPE, replace(config, scale=0.5)) != results.path(RECIPE, config)


def test_found_again_with_all_it_had(results: Results) -> None:
    config = Config(widths=(8, 4), clip=0.1)
    assert results.find(RECIPE, config) is None
    assert results.all(RECIPE) == []
    path = saved(results, config)
    found = results.find(RECIPE, config)
    assert found is not None
    assert found["config"] == asdict(config) | {"widths": [8, 4]}
    assert found["figures"] == {"validation": 0.5, "test": 0.8}
    assert results.find(RECIPE, replace(config, seed=1)) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing else is left behind


def test_all_in_the_order_of_the_names(results: Results) -> None:
    for config in (Config(seed=1), Config(norm="contra"), Config(seed=0)):
        saved(results, config)
    assert [(r["config"]["norm"], r["seed"]) for r in results.all(RECIPE)] == [("contra", 0), ("none", 0), ("none", 1)]


def test_what_is_not_finite_becomes_null(results: Results) -> None:
    made = result(math.nan) | {"epochs": [{"loss": math.inf}, {"loss": 1.0}]}
    path = results.save(RECIPE, Config(), made)
    stored = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert stored["figures"]["test"] is None
    assert [epoch["loss"] for epoch in stored["epochs"]] == [None, 1.0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"recipe": "made-up", "conf', "Unterminated string"),
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "decode"),
        (b"[1]", "JSON object"),
        (b'{"recipe": "made-up", "config": {}}', "lacks figures"),
        (b'{"recipe": "made-up"}', "lacks config and figures"),
        (b'{"recipe": "other", "config": {}, "figures": {}}', "it is of the recipe 'other', not 'made-up'"),
    ],
)
def test_a_file_that_is_no_result_is_set_aside(results: Results, content: bytes, why: str) -> None:
    path = saved(results, Config())
    saved(results, Config(seed=1))
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=why):
        assert results.find(RECIPE, Config()) is None
    aside = path.with_name(path.name + ".broken")
    assert aside.read_bytes() == content
    assert not path.exists()
    assert len(results.all(RECIPE)) == 1
    aside.rename(path)
    with pytest.warns(UserWarning, match="count"):
        assert len(results.all(RECIPE)) == 1
    assert path.exists()  # who only looks renames nothing


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": None}, "its seed is not"),
        ({"config": {"seed": 0, "layers": {"a": 1}}}, "layers"),
    ],
)
def test_records_that_a_table_could_not_read(results: Results, changes: dict[str, Any], why: str) -> None:
    path = saved(results, Config())
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
    with pytest.warns(UserWarning, match=why):
        assert results.all(RECIPE) == []


def test_a_copy_under_another_name_does_not_count(results: Results) -> None:
    path = saved(results, Config())
    path.with_name("copy--0123456789.json").write_bytes(path.read_bytes())
    with pytest.warns(UserWarning, match="settings"):
        assert len(results.all(RECIPE)) == 1


def test_a_file_is_no_folder_of_results(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="a file"):
        Results(tmp_path / "file").all(RECIPE)


def test_a_default_that_changed(results: Results) -> None:
    path = saved(results, Config())

    @dataclass(frozen=True)
    class Later(Config):
        epochs: int = 300

    later = SimpleNamespace(**vars(RECIPE) | {"config": Later})
    assert results.path(later, Later()) == path
    with pytest.raises(UsageError, match=r"200.*300"):
        results.find(later, Later())
    assert path.exists()


def test_a_field_that_came_later_had_its_default(results: Results) -> None:
    saved(results, Config())

    @dataclass(frozen=True)
    class Later(Config):
        residual: bool = False

    later = SimpleNamespace(**vars(RECIPE) | {"config": Later})
    found = results.find(later, Later())
    assert found is not None
    assert found["config"]["residual"] is False
    assert results.all(later)[0]["config"]["residual"] is False
    assert results.find(later, Later(residual=True)) is None


def test_a_field_that_is_gone(results: Results) -> None:
    path = saved(results, Config())
    stored = json.loads(path.read_text())
    stored["config"]["old"] = 1
    path.write_text(json.dumps(stored))
    with pytest.raises(UsageError, match="setting old"):
        results.find(RECIPE, Config())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(UsageError, match=r"made-up.*written"):
        saved(Results(tmp_path / "results"), Config())


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file", "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("writing_files", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for _ in range(60):
    module.write(Path(sys.argv[2]), sys.argv[3] * 100_000)
"""


def test_two_processes_write_the_same_file(tmp_path: Path) -> None:
    """Whoever reads meanwhile sees the whole of one or of the other."""
    path = write(tmp_path / "file", "a" * 100_000)
    source = sys.modules["uncollapse.io.files"].__file__
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(source), path, letter]) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        content = path.read_text()
        seen.add((content[0], content.count(content[0])))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {("a", 100_000), ("b", 100_000)}
    assert list(tmp_path.iterdir()) == [path]
