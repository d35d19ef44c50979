"""The labelled .mat of NYU-Depth-V2: files that the test makes are read as they should be, others are refused."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import depth_maps
from uncollapse.lab.data.image.depth_maps import center_square, file_digest, read_scenes, resize_maps

h5py: Any = pytest.importorskip("h5py")


def arrays(count: int = 5, width: int = 12, height: int = 8) -> dict[str, Any]:
    """In MATLAB's order: (n, 3, width, height) and (n, width, height)."""
    rng = numpy.random.default_rng(0)
    return {
        "images": rng.integers(0, 256, (count, 3, width, height), dtype="uint8"),
        "depths": rng.uniform(1, 9, (count, width, height)).astype("float32"),
    }


def put(path: Path, made: dict[str, Any] | None = None, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in (arrays() if made is None else made).items():
            file.create_dataset(name, data=array, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}])
@pytest.mark.parametrize("at_once", [2, 16])
def test_pictures_are_upright_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], at_once: int
) -> None:
    monkeypatch.setattr(depth_maps, "AT_ONCE", at_once)
    made = arrays()
    scenes = read_scenes(put(tmp_path / "nyu.mat", made, **options), 8, 8)  # of 12×8 the middle 8×8, in full size
    upright = made["images"].transpose(0, 1, 3, 2)[..., 2:10]
    assert torch.equal(scenes.images, torch.from_numpy(upright.copy()))
    depths = made["depths"].transpose(0, 2, 1)[..., 2:10].copy()
    torch.testing.assert_close(scenes.depths, torch.from_numpy(depths))


def test_smaller_sizes_are_means(tmp_path: Path) -> None:
    made = arrays(width=8, height=8)
    scenes = read_scenes(put(tmp_path / "nyu.mat", made), 4, 1)
    assert scenes.images.shape == (5, 3, 4, 4)
    assert scenes.depths.shape == (5, 1, 1)
    exact = torch.from_numpy(made["depths"]).transpose(-1, -2)
    torch.testing.assert_close(scenes.depths, resize_maps(exact[:, None], 1)[:, 0])
    flat = arrays() | {"depths": numpy.full((5, 12, 8), 2.5, "float64")}
    torch.testing.assert_close(read_scenes(put(tmp_path / "flat.mat", flat), 4, 3).depths, torch.full((5, 3, 3), 2.5))


def test_only_the_first_are_read(tmp_path: Path) -> None:
    made = arrays()
    made["depths"][3] = numpy.nan  # would be refused
    path = put(tmp_path / "nyu.mat", made)
    assert len(read_scenes(path, 4, 4, count=3).images) == 3
    with pytest.raises(UsageError, match="too few"):
        read_scenes(path, 4, 4, count=6)


def test_the_digest_changes_with_the_file(tmp_path: Path) -> None:
    made = arrays()
    first = file_digest(put(tmp_path / "a.mat", made))
    assert file_digest(put(tmp_path / "b.mat", made)) == first
    made["depths"][-1, 0, 0] += 1
    assert file_digest(put(tmp_path / "c.mat", made)) != first
    assert file_digest(put(tmp_path / "d.mat", arrays(6))) != first


def test_squares() -> None:
    assert center_square(torch.arange(15).reshape(3, 5)).tolist() == [[1, 2, 3], [6, 7, 8], [11, 12, 13]]
    assert center_square(torch.arange(8).reshape(4, 2)).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("bad", [0.0, -1.0, numpy.nan, numpy.inf])
def test_depths_are_metres(tmp_path: Path, bad: float) -> None:
    made = arrays()
    made["depths"][4, 1, 1] = bad
    with pytest.raises(UsageError, match=r"image 4"):
        read_scenes(put(tmp_path / "nyu.mat", made), 4, 4)


def changed(**arrays_: Any) -> dict[str, Any]:
    return {name: array for name, array in (arrays() | arrays_).items() if array is not None}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (changed(depths=None), "has no array 'depths'; expected images and depths"),
        (changed(images=numpy.zeros((5, 3, 12, 8), "float32")), r"of uint8 .* got float32 \(5, 3, 12, 8\)"),
        (changed(depths=numpy.ones((5, 8, 12), "float32")), r"got uint8 \(5, 3, 12, 8\) and float32 \(5, 8, 12\)"),
        (changed(depths=numpy.ones((5, 12, 8), "int32")), "and int32"),
        (changed(images=numpy.zeros((5, 12, 8), "uint8")), r"images \(n, 3, width, height\)"),
        (arrays(0), "4096 pixels"),
        (arrays(1, 5000, 1), "4096 pixels"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, made: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_scenes(put(tmp_path / "nyu.mat", made), 4, 4)


def test_what_only_is_declared_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "nyu.mat"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (90_000, 3, 4000, 4000), "uint8", chunks=(1, 3, 64, 64))
        file.create_dataset("depths", (90_000, 4000, 4000), "float32", chunks=(1, 64, 64))
    with pytest.raises(UsageError, match="no data"):
        read_scenes(path, 64, 64)
    assert path.stat().st_size < 100_000


def test_too_much_for_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory"):
        read_scenes(put(tmp_path / "nyu.mat"), 20_000, 4)


def test_chunks_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "nyu.mat", chunks=True)
    monkeypatch.setattr(depth_maps, "CHUNK", 10)
    with pytest.raises(UsageError, match=r"chunks"):
        read_scenes(path, 4, 4)


@pytest.mark.parametrize("kind", ["external", "soft", "group", "virtual", "raw"])
def test_nothing_outside_the_file_is_read(tmp_path: Path, kind: str) -> None:
    other, path = put(tmp_path / "other.mat"), tmp_path / "nyu.mat"
    (tmp_path / "raw").write_bytes(bytes(1440))
    with h5py.File(path, "w") as file:
        file["depths"] = arrays()["depths"]
        if kind == "external":
            file["images"] = h5py.ExternalLink(str(other), "images")
        elif kind == "soft":
            file["images"] = h5py.SoftLink("/depths")
        elif kind == "group":
            file.create_group("images")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((5, 3, 12, 8), "uint8")
            layout[:] = h5py.VirtualSource(str(other), "images", (5, 3, 12, 8))
            file.create_virtual_dataset("images", layout)
        else:
            file.create_dataset("images", (5, 3, 12, 8), "uint8", external=[(str(tmp_path / "raw"), 0, 1440)])
    with pytest.raises(UsageError, match=r"images.*array"):
        read_scenes(path, 4, 4)


def test_torn_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nyu_depth_v2_labeled\.mat"):
        read_scenes(tmp_path / "nyu.mat", 4, 4)
    (tmp_path / "nyu.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(UsageError, match="MATLAB"):
        read_scenes(tmp_path / "nyu.mat", 4, 4)
    path = put(tmp_path / "torn.mat", compression="gzip")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(UsageError, match="valid HDF5"):
        read_scenes(path, 4, 4)
