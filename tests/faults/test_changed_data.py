"""Data that change while a run reads them, or between a run and the one that goes on with it.

What is read once into memory cannot disturb a run any more: its result says which data it is of, and is refused beside
other data. What is read piece by piece is looked at again at the end, or is counted as unreadable.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import torch
from tests.lab.data.graph import made_up_graphs
from tests.lab.data.image import made_up_images

from uncollapse.errors import UsageError
from uncollapse.io.embedding_files import open_rows
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.image_batches import ImageBatches
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.glue import config as sentences
from uncollapse.lab.recipe import RECIPES

from .machine import Machine, litter
from .remains import check_whole, said
from .scenes import TRAIN, furnish

Count = Callable[[str, object], None]
TEXAS = [*TRAIN, "--data", "texas", "--data-root", "data"]


def with_graphs(folder: Path) -> Path:
    """A folder `data` with a graph, and a folder `other` with one that has other features."""
    furnish(folder)
    made_up_graphs.save(folder / "data" / "heterophilous" / "texas.npz")
    changed = made_up_graphs.heterophilous()["node_features"] * 2 + numpy.eye(40, 6, dtype="float32")
    made_up_graphs.save(folder / "other" / "heterophilous" / "texas.npz", node_features=changed)
    return folder


def results(folder: Path) -> dict[str, Any]:
    return {name: content for name, content in said(folder).items() if name.startswith("results")}


@pytest.fixture
def whole(machine: Machine, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What comes of each graph, undisturbed."""
    found = {}
    for name in ("data", "other"):
        folder = with_graphs(tmp_path / f"whole-{name}")
        assert machine.run(folder, *TEXAS[:-1], name).code == 0
        found[name] = results(folder)
    assert found["data"] != found["other"]
    return found


def test_a_graph(machine: Machine, tmp_path: Path, whole: dict[str, Any], record_property: Count) -> None:
    """It changes between a kill and the next run, during a run, and after one."""
    counted = machine.run(with_graphs(tmp_path / "count"), *TEXAS, watched=tmp_path / "count" / "runs").operations
    killed = with_graphs(tmp_path / "killed")
    machine.run(killed, *TEXAS, watched=killed / "runs", fault="kill", at=counted // 2)
    os.replace(killed / "other" / "heterophilous" / "texas.npz", killed / "data" / "heterophilous" / "texas.npz")
    answer = machine.run(killed, *TEXAS)
    assert answer.code == 0, answer.err
    assert "but the data or the model that it started from has changed since" in answer.err
    assert results(killed) == whole["other"]
    cases = 1
    for at in (counted // 3, counted - 3):
        folder = with_graphs(tmp_path / f"swapped-{at}")
        assert machine.run(folder, *TEXAS, watched=folder / "runs", fault="swap", at=at).code == 0
        check_whole(folder)
        assert results(folder) == whole["data"]  # it was read before
        assert "on other data" in machine.run(folder, *TEXAS).sentence
        assert machine.run(folder, *TEXAS, "--again").code == 0
        assert results(folder) == whole["other"]
        cases += 2
    assert litter(killed) == []
    record_property("cases", cases)


def _npy(path: Path, rows: Any) -> Path:
    numpy.save(path.with_suffix(".npy"), rows)
    return path.with_suffix(".npy")


def _npz(path: Path, rows: Any) -> Path:
    numpy.savez(path.with_suffix(".npz"), rows=rows)
    return path.with_suffix(".npz")


def _safetensors(path: Path, rows: Any) -> Path:
    safetensors.numpy.save_file({"rows": rows}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


@pytest.mark.parametrize("save", [_npy, _npz, _safetensors])
@pytest.mark.parametrize("change", ["other rows", "another file", "cut off", "gone"])
def test_embeddings(tmp_path: Path, save: Callable[..., Path], change: str, record_property: Count) -> None:
    rows = numpy.random.default_rng(0).normal(size=(9000, 4)).astype("float32")
    path = save(tmp_path / "rows", rows)
    parts = open_rows(path).parts()
    next(parts)
    if change == "cut off":
        os.truncate(path, 50_000)
    elif change == "gone":
        path.unlink()
    else:
        other = save(tmp_path / "other", rows + 1)
        path.write_bytes(other.read_bytes()) if change == "other rows" else os.replace(other, path)
        os.utime(path, (0, 0))
    with pytest.raises(UsageError, match=r"rows\.(npy|npz|safetensors)"):
        list(parts)
    record_property("cases", 1)


def test_pictures(tmp_path: Path, record_property: Count) -> None:
    """Those that vanish or tear during a run are left out and counted; between runs the fingerprint tells."""
    root = made_up_images.folder(tmp_path)
    found = image_sets.load_image_set(".", root).train
    before = found.fingerprint()
    paths = [Path(found.source.path(int(number))) for number in found.numbers]
    batches = iter(ImageBatches(found, range(len(found)), 3, lambda picture: torch.from_numpy(numpy.array(picture))))
    assert next(batches).skipped == 0
    paths[3].unlink()
    paths[4].write_bytes(paths[4].read_bytes()[:20])
    paths[7].write_bytes(b"")
    assert [batch.skipped for batch in batches] == [2, 1]
    assert image_sets.load_image_set(".", root).train.fingerprint() != before
    record_property("cases", 4)


def test_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Count) -> None:
    """A row of a TSV file changes: a result of the old ones is no result of the new ones."""
    from ..lab import tiny_text  # noqa: TID252

    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    model = tiny_text.tiny_model(tmp_path / "model")
    root = tiny_text.write_sst2(tmp_path / "data", tiny_text.SENTENCES)
    config, runtime = sentences.Config(task="sst2", model=str(model), max_length=16), Runtime(data_root=root)
    record = {"data": {"fingerprint": sentences.load(config, runtime, sentences.Origin(str(model))).fingerprint()}}
    assert RECIPES["glue"].same_data(config, runtime, record)
    path = root / "SST-2" / "train.tsv"
    intact = path.read_text(encoding="utf-8")
    for changed in (
        intact.replace("\t1", "\t0", 1),
        intact.replace("good", "bad", 1),
        intact.rsplit("\n", 2)[0] + "\n",
    ):
        path.write_text(changed, encoding="utf-8")
        assert not RECIPES["glue"].same_data(config, runtime, record)
    path.write_text(intact, encoding="utf-8")
    assert RECIPES["glue"].same_data(config, runtime, record)
    path.unlink()
    assert RECIPES["glue"].same_data(config, runtime, record)  # they are not here: they cannot be others
    record_property("cases", 4)
