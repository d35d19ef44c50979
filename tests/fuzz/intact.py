"""Small intact files of every kind that is read, and how each is read to its end."""

import gzip
import io
import json
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy
import pyarrow
import pyarrow.parquet
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io import batches, graphs, images, tensor_files
from uncollapse.io import images as decoding
from uncollapse.io.embedding_files import open_rows
from uncollapse.io.images import UnreadableError
from uncollapse.io.planetoid import read_matrix, read_neighbours
from uncollapse.lab.data.graph import graph_files, splits
from uncollapse.lab.data.image import depth_maps, image_files, image_source
from uncollapse.lab.data.text import encoded_texts, glue_files, labelled_sentences, running_text

RANDOM = numpy.random.default_rng(0)
ROWS = RANDOM.normal(size=(40, 6)).astype("float32")
PICTURE = Image.fromarray(RANDOM.integers(0, 255, (12, 12, 3), "uint8"))
SCENES = {
    "images": RANDOM.integers(0, 256, (3, 3, 8, 8), "uint8"),
    "depths": RANDOM.uniform(1, 9, (3, 8, 8)).astype("float32"),
}


@dataclass(frozen=True)
class Case:
    """A kind of file. name: of the file, below an empty folder. read: takes its path."""

    name: str
    content: bytes
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = (UsageError,)


def rows(path: Path) -> None:
    deque(open_rows(path).parts(), maxlen=0)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array, **options)
    return file.getvalue()


def npz(packed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (numpy.savez_compressed if packed else numpy.savez)(file, **arrays)
    return file.getvalue()


def table(**columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=15)
    return file.getvalue()


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def picture(form: str) -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, form)
    return file.getvalue()


def scenes(**options: Any) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        for name, array in SCENES.items():
            made.create_dataset(name, data=array, **options)
    return file.getvalue()


def brown() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("brown/ca01", "The/at jury/nn said/vbd ./.\n\n" * 20)
    return file.getvalue()


def graph() -> dict[str, Any]:
    masks = numpy.zeros((2, 40), bool), numpy.zeros((2, 40), bool), numpy.zeros((2, 40), bool)
    for part, mask in enumerate(masks):
        mask[:, part::3] = True
    return {
        "node_features": ROWS,
        "node_labels": RANDOM.integers(0, 3, 40),
        "edges": RANDOM.integers(0, 40, (60, 2)),
        **dict(zip(("train_masks", "val_masks", "test_masks"), masks, strict=True)),
    }


def packed() -> dict[str, Any]:
    files = [picture("PNG"), picture("JPEG")]
    return {
        "data": numpy.frombuffer(b"".join(files), "uint8"),
        "offsets": numpy.cumsum([0, *map(len, files)]),
        "labels": numpy.array([0, 1]),
        "classes": numpy.array(["cat", "dog"]),
    }


def read_packed(path: Path) -> None:
    found = image_files.read_packed(path)
    for number in range(min(len(found), 50)):
        found.image(number)


def read_tsv(path: Path) -> Any:
    return glue_files.read_split(glue_files.own_task(path.parent), "train", path.parent)


def read_zip(path: Path) -> Any:
    return running_text.load_documents("brown", "lines", path.parent)


def read_list(path: Path) -> Any:
    return image_source.read_class_list(path).classes(("n01", "n02"))


def read_labelled(path: Path) -> Any:
    return labelled_sentences.load_task("mr", path.parent)


def read_text(path: Path) -> Any:
    return running_text.load_documents("t.txt", "text", path.parent)


def read_picture(path: Path) -> Any:
    return decoding.decode_image(io.BytesIO(path.read_bytes()), "p")


def read_split(path: Path) -> Any:
    y = torch.zeros(40, dtype=torch.long)
    return splits.choose_split("contranorm", 0, y, splits.OwnSplits((), ()), name="cora", root=path.parents[1])


def read_arxiv(path: Path) -> Any:
    folder = path.parents[1]
    for name in graph_files.FILES:
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            lines = {"node-feat": "1,2\n" * 9, "node-label": "0\n1\n2\n" * 3, "edge": "0,1\n1,2\n"}
            part = "0\n1\n2\n" if "train" in name else "3\n4\n" if "valid" in name else "5\n6\n"
            (folder / name).write_bytes(gzip.compress(lines.get(Path(name).name.split(".")[0], part).encode()))
    return graph_files.read_arxiv(folder.parent)


def read_fashion(path: Path) -> Any:
    """torchvision reads these without any sum that is known beforehand."""
    return image_files.load_torchvision("fashion-mnist", path.parents[2])


MODEL = nn.Linear(3, 2)
STATE = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}


def load_weights(path: Path) -> None:
    tensor_files.load_into(MODEL, path)


def raw(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def pickled_array(values: Any) -> bytes:
    """An array as Python 2 pickled it."""
    shape = b"".join(b"J" + size.to_bytes(4, "little") for size in values.shape)
    kind = b"cnumpy\ndtype\n(U\x02" + values.dtype.str[1:].encode() + b"J\0\0\0\0J\1\0\0\0tR"
    kind += b"(J\3\0\0\0U\1<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffJ\0\0\0\0tb"
    body = values.tobytes()
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\0\0\0\0tU\1btR"
    return made + b"(J\1\0\0\0(" + shape + b"t" + kind + b"\x89T" + len(body).to_bytes(4, "little") + body + b"tb"


LISTS = b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(" + b"K\0]r\0\0\0\0(K\1K\2eK\1]r\1\0\0\0(K\0eu"
IMAGES = (UnreadableError,)
PARTS = {"train": numpy.arange(9), "val": numpy.arange(9, 20), "test": numpy.arange(20, 40)}

CASES = {
    "npy": Case("x.npy", npy(ROWS), rows),
    "npy by column": Case("x.npy", npy(numpy.asfortranarray(ROWS)), rows),
    "npz": Case("x.npz", npz(a=ROWS), rows),
    "npz packed": Case("x.npz", npz(packed=True, a=ROWS), rows),
    "safetensors": Case("x.safetensors", safetensors.torch.save({"a": torch.from_numpy(ROWS)}), rows),
    "parquet lists": Case("x.parquet", table(vector=list(ROWS)), rows),
    "parquet columns": Case("x.parquet", table(**{f"f{i}": ROWS[:, i] for i in range(6)}), rows),
    "graph npz": Case("g.npz", npz(**graph()), lambda path: graphs.load_graph(str(path), None)),
    "graph pt": Case(
        "g.pt",
        torch_file({"x": torch.ones(5, 2), "edge_index": torch.tensor([[0, 1], [1, 4]])}),
        lambda path: graphs.load_graph(str(path), None),
    ),
    "heterophilous": Case(
        "texas.npz", npz(**graph()), lambda path: graph_files.read_heterophilous("texas", path.parent)
    ),
    "split": Case("contranorm_splits/cora.npz", npz(**PARTS), read_split),
    "arxiv": Case("ogbn_arxiv/raw/edge.csv.gz", gzip.compress(b"0,1\n1,2\n2,3\n"), read_arxiv),
    "weights pt": Case("w.pt", torch_file(STATE), load_weights),
    "weights safetensors": Case("w.safetensors", safetensors.torch.save(STATE), load_weights),
    "matrix": Case("ind.cora.y", raw(pickled_array(ROWS)), read_matrix),
    "neighbours": Case("ind.cora.graph", raw(LISTS), read_neighbours),
    "tsv": Case("train.tsv", 'sentence\tlabel\nA fine day.\tyes\nNo "rain".\tno\nÉté\tyes\n'.encode(), read_tsv),
    "tsv scores": Case("train.tsv", b"sentence1\tsentence2\tscore\na\tb\t1.5\nc\td\t-2\n", read_tsv),
    "lines": Case("x.txt", "one\ntwo\n\nthree é\n".encode(), lambda path: batches.read_lines(str(path))),
    "class list": Case("c.txt", b"# wanted\nn01 cat\nn02 dog\n", read_list),
    "labelled": Case("rt-polarity.all", b"0 a bad film\n1 a good film\n" * 3, read_labelled),
    "brown": Case("brown.zip", brown(), read_zip),
    "running text": Case("t.txt", b"Mr. Lee came. He sat.\n\nIt was late!\n", read_text),
    "scenes": Case("nyu.mat", scenes(), lambda path: depth_maps.read_scenes(path, 4, 4)),
    "scenes packed": Case(
        "nyu.mat", scenes(compression="gzip", chunks=True), lambda path: depth_maps.read_scenes(path, 4, 4)
    ),
    "packed pictures": Case("p.npz", npz(**packed()), read_packed, (UsageError, UnreadableError)),
    "kept tokens": Case(
        "t.safetensors",
        safetensors.torch.save({"ids": torch.zeros(4, dtype=torch.int32), "starts": torch.tensor([0, 2, 4])}),
        lambda path: encoded_texts._read_cache(path, 2),
    ),
    **{f"picture {form}": Case("p.png", picture(form), read_picture, IMAGES) for form in decoding.FORMATS},
    **{
        f"picture of a model {form}": Case("p.png", picture(form), lambda path: list(images.open_images([path], [])))
        for form in ("PNG", "JPEG", "GIF", "TIFF")
    },
}


def described(folder: Path, name: str) -> Any:
    """The JSON in a file."""
    return json.loads((folder / name).read_text(encoding="utf-8"))
