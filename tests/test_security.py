"""What the source must not do with files of others, and what hostile files and names come to."""

import ast
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import graphs, tensor_files
from uncollapse.io.planetoid import read_matrix
from uncollapse.lab.config.fields import build
from uncollapse.lab.data.image import image_files
from uncollapse.lab.data.text import running_text
from uncollapse.lab.engine.checkpoints import STATE, Checkpoints, _digest
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_folder

SOURCE = Path(uc.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "joblib",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "pandas.read_pickle",
}
ALLOWED = {  # the file, and why it may
    ("io/planetoid.py", "pickle"): "Planetoid's files: an unpickler that only knows stand-ins",
    ("io/tensor_files.py", "pickle"): "the error that torch.load raises",
    ("io/models.py", "exec_module"): "the user's own file.py:function",
    ("lab/runs/workers.py", "recv"): "between a sweep and the processes that it started, through their own pipes",
}


def name_of(node: ast.expr) -> str:
    """A dotted name; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def argument(call: ast.Call, name: str) -> Any:
    """The constant that an argument has, None without one, ... for a value that is computed."""
    found = next((word.value for word in call.keywords if word.arg == name), None)
    return found.value if isinstance(found, ast.Constant) else None if found is None else ...


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines that could run or write what a file says, and what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ((node.lineno, name) for name in names if name.partition(".")[0] in MODULES)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "shell", "weights_only"):
            safe = node.arg == "weights_only"
            if not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                yield node.value.lineno, node.arg
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value in ("allow_pickle", "trust_remote_code", "shell")
                if named and not (isinstance(value, ast.Constant) and value.value is False):
                    yield value.lineno, "a dictionary of options"
        if isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _called(node))


def _called(call: ast.Call) -> Iterator[str]:
    name = name_of(call.func)
    last = name.rpartition(".")[2]
    if (isinstance(call.func, ast.Name) and name in ("eval", "exec", "compile", "__import__")) or last in (
        "exec_module",
        "recv",
        "loads_pickle",
        "read_pickle",
    ):
        yield last
    if last in ("system", "popen", "getoutput", "spawnl", "execv", "mktemp"):
        yield last
    if name == "torch.load" and argument(call, "weights_only") is not True:
        yield name
    if name in ("numpy.load", "np.load") and argument(call, "allow_pickle") is not False:
        yield name
    safe = any(name_of(word.value).endswith("SafeLoader") for word in call.keywords if word.arg == "Loader")
    if (
        name.startswith("yaml.")
        and last in ("load", "load_all", "unsafe_load", "full_load", "compose", "parse")
        and not safe
    ):
        yield name
    if last in ("extractall", "extract", "unpack_archive"):
        yield last
    if last == "from_pretrained" and not any(word.arg is None for word in call.keywords):  # Origin.options has the flag
        yield last


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_in_a_file_is_run(path: Path) -> None:
    file = path.relative_to(SOURCE).as_posix()
    found = dangers(ast.parse(path.read_text(encoding="utf-8")))
    assert [f"{file}:{line}: {what}" for line, what in found if (file, what) not in ALLOWED] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "import dill as d",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path)",
        "numpy.load(path, allow_pickle=flag)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "tar.extractall(folder)",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "connection.recv()",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(dangers(ast.parse(line)))


def test_every_exception_is_needed() -> None:
    for file, what in ALLOWED:
        found = dangers(ast.parse((SOURCE / file).read_text(encoding="utf-8")))
        assert any(there == what for _, there in found), (file, what)


class Runs:
    """A pickle of it writes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Runs]:
    """Something that must never run."""
    runs = Runs(tmp_path / "it-ran")
    yield runs
    assert not runs.path.exists()


def objects(trap: Runs) -> Any:
    made = numpy.empty(1, object)
    made[0] = trap
    return made


def test_torch_files_with_code_are_refused(tmp_path: Path, trap: Runs) -> None:
    for value in (trap, {"weight": trap}, {"x": torch.ones(1, 1), "edge_index": trap}):
        torch.save(value, tmp_path / "w.pt")
        with pytest.raises(UsageError, match="run code"):
            tensor_files.load_into(nn.Linear(1, 1), tmp_path / "w.pt")
        with pytest.raises(UsageError, match="run code"):
            graphs.load_graph(str(tmp_path / "w.pt"), None)


def test_arrays_with_code_are_refused(tmp_path: Path, trap: Runs) -> None:
    numpy.save(tmp_path / "x.npy", objects(trap), allow_pickle=True)
    numpy.savez(
        tmp_path / "x.npz", node_features=objects(trap), edges=objects(trap), data=objects(trap), a=objects(trap)
    )
    for read in (
        lambda: _rows(tmp_path / "x.npy"),
        lambda: _rows(tmp_path / "x.npz"),
        lambda: graphs.load_graph(str(tmp_path / "x.npz"), None),
        lambda: image_files.read_packed(tmp_path / "x.npz"),
    ):
        with pytest.raises(UsageError):
            read()


def _rows(path: Path) -> Any:
    from uncollapse.io.embedding_files import open_rows

    return list(open_rows(path, "a" if path.suffix == ".npz" else None).parts())


def test_pickles_of_data_sets_are_not_run(tmp_path: Path, trap: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ind.cora.x").write_bytes(pickle.dumps(trap, protocol=2))
    with pytest.raises(UsageError, match="not allowed"):
        read_matrix(tmp_path / "ind.cora.x")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(trap))
    monkeypatch.setattr("socket.socket.connect", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError("no network")))
    with pytest.raises(UsageError, match="folder cifar-10-batches-py"):
        image_files.load_torchvision("cifar10", tmp_path)


def test_folders_of_models_run_no_code(tmp_path: Path, trap: Runs) -> None:
    from uncollapse.io import models

    own = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "evil.py").write_text(f"open({str(trap.path)!r}, 'w').close()")
    with pytest.raises(UsageError, match="loaded"):
        models.load_model(str(tmp_path))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", ["pipe", "device", "deep", "large"])
def test_the_config_of_a_model_is_a_small_regular_file(tmp_path: Path, kind: str) -> None:
    from uncollapse.io import models

    config = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "device":
        config.symlink_to("/dev/null")
    elif kind == "deep":
        config.write_text("[" * 100_000)
    else:
        config.write_text(" " * 2**25)
    with pytest.raises(UsageError, match=r"config\.json"):
        models.load_model(str(tmp_path))


HOSTILE = [
    "../../x",
    "/etc/x",
    "..",
    ".",
    "a/../../../b",
    "a\x00b",
    "x" * 3000,
    "con",
    "a\nb",
    "-rf",
    "~",
    "é" * 200,
    "",
    "\\..\\x",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_and_checkpoints_stay_in_their_folders(tmp_path: Path, recipe: str) -> None:
    chosen = RECIPES[recipe]
    taken = 0
    for field, default in vars(chosen.config()).items():
        for name in HOSTILE if isinstance(default, str) else ():
            try:
                config = build(chosen.config, {field: name})
            except (ValueError, OSError):  # refused at once
                continue
            taken += 1
            for path in (Results(tmp_path).path(chosen, config), run_folder(chosen, config, tmp_path)):
                assert path.resolve().parent == (tmp_path / chosen.name).resolve()
                assert len(path.name.encode()) <= 255
                assert "\x00" not in path.name
    assert taken or recipe in ("arena", "gcn-depth", "potentials", "vit-digits")  # texts of these are all choices


@pytest.mark.parametrize("name", HOSTILE)
def test_a_run_with_any_name_is_one_file(tmp_path: Path, name: str) -> None:
    recipe: Any = SimpleNamespace(name="made-up", name_of=lambda config: name)
    path = Results(tmp_path).path(recipe, RECIPES["potentials"].config())
    path.parent.mkdir()
    path.write_text("{}")
    assert [found.name for found in (tmp_path / "made-up").iterdir()] == [path.name]
    assert not path.name.startswith(".")


@pytest.mark.parametrize("group", ["../../secret", "/etc/passwd", "a/b", "..", ""])
def test_a_checkpoint_names_no_files_elsewhere(tmp_path: Path, group: str) -> None:
    checkpoint = Checkpoints(tmp_path / "run", "0f3a")
    place = checkpoint.save(1, {"model": {"weight": torch.ones(2)}}, {})
    facts = json.loads((place / STATE).read_text())
    content = (place / "model.safetensors").read_bytes()
    facts.pop("sha256")
    facts["files"] = {group: facts["files"]["model"]}
    (place / STATE).write_text(json.dumps({**facts, "sha256": _digest(facts)}))
    (tmp_path / "secret.safetensors").write_bytes(content)  # what ../../secret would find
    with pytest.warns(UserWarning, match="not used"):
        assert checkpoint.load() is None


def test_names_inside_of_archives_write_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "brown.zip", "w") as made:
        made.writestr("../../ca01", "The/at jury/nn\n")
        made.writestr("/ca02", "It/it rained/vbd\n")
    before = set(tmp_path.parent.rglob("*"))
    assert len(running_text.load_documents("brown", "lines", tmp_path)) == 2
    assert set(tmp_path.parent.rglob("*")) == before


def test_a_link_in_the_place_of_a_result_is_replaced_not_followed(tmp_path: Path) -> None:
    from uncollapse.io.files import write

    (tmp_path / "mine").write_text("mine")
    (tmp_path / "d.json").symlink_to(tmp_path / "mine")
    write(tmp_path / "d.json", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "d.json").is_symlink()
