"""The tree shows the architecture: who may import whom, how many entries a folder has, what a module says of itself."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import uncollapse

PACKAGE = Path(uncollapse.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Package -> the packages (or modules at the top) that it may import, lazy imports included; absent: no rule.
ALLOWED = {
    "errors": set(),
    "registry": {"errors"},
    "distributed": {"errors"},
    "pairwise": {"errors", "distributed"},
    "metrics": {"pairwise", "registry", "errors"},
    "cures": {"pairwise", "registry", "errors"},
    "losses": {"pairwise", "registry", "errors"},
}
# Package -> what it must not import.
FORBIDDEN = {
    "backbones": {"attachment", "diagnosis", "monitoring", "report", "tuning"},
    "attachment": {"diagnosis", "monitoring", "report", "tuning"},
    "diagnosis": {"monitoring", "report", "tuning"},
    "report": {"monitoring", "tuning"},
    "io": {"attachment", "diagnosis", "monitoring", "report", "tuning"},
}
MOST_AT_THE_TOP = 20  # 17 packages and modules, and __init__, __main__, py.typed
MOST_IN_A_FOLDER_OF_LAB = 12
MOST_FILES = 275  # without those of cures and losses, one per entry


def module_name(path: Path) -> str:
    """Return the dotted name of a module inside the package, "" for its own `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports anywhere, type checking aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "uncollapse":
                while rest and rest not in MODULES:
                    rest = rest.rpartition(".")[0]
                yield rest


def room(module: str) -> str:
    """Return the package, or the module at the top, that a module belongs to."""
    return module.partition(".")[0]


def entries(folder: Path) -> list[str]:
    """Return what a folder shows to a reader."""
    return sorted(p.name for p in folder.iterdir() if p.name != "__pycache__" and not p.name.startswith("."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "uncollapse")
def test_imports_go_one_way(path: Path) -> None:
    own = room(module_name(path))
    for imported in imports(path):
        other = room(imported)
        if other in ("", own):
            continue
        assert own not in ALLOWED or other in ALLOWED[own], f"{own} imports {imported}"
        assert other not in FORBIDDEN.get(own, ()), f"{own} imports {imported}"
        assert other != "lab" or own == "cli", f"{own} imports {imported}: only the command line runs experiments"
        assert other != "cli" or own == "__main__", f"{own} imports {imported}: the command line is the outermost layer"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports at the top of modules and inside functions together have no cycle between packages."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if room(name):  # the package's own __init__ gives out names of all others
            graph.setdefault(room(name), set()).update(
                room(i) for i in imports(path) if room(i) not in ("", room(name))
            )
    done: set[str] = set()
    while left := {name for name in graph if name not in done}:
        free = {name for name in left if not (graph[name] & left)}
        assert free, f"these packages import each other in a circle: {', '.join(sorted(left))}"
        done |= free


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "uncollapse")
def test_docstrings_open_with_what_a_module_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "a module says in its first line what it is for"
    first = docstring.splitlines()[0]
    assert len(first) >= 15, first
    assert first[0].isupper() or first[0] in "`A" or re.match(r"\w+ ", first), first
    assert first.endswith((".", ":", "?")), first
    assert not re.match(r"(What|Where|How|Which|Whether|Who|When)\b", first), f"name it, do not paraphrase it: {first}"


def test_few_entries_at_the_top() -> None:
    assert len(entries(PACKAGE)) <= MOST_AT_THE_TOP, entries(PACKAGE)


@pytest.mark.parametrize(
    "folder", [PACKAGE / "lab", *(p for p in sorted((PACKAGE / "lab").rglob("*")) if p.is_dir())], ids=lambda p: p.name
)
def test_few_entries_in_a_folder_of_lab(folder: Path) -> None:
    if folder.name != "__pycache__":
        counted = [entry for entry in entries(folder) if folder.name != "experiments" or "." in entry]  # any number
        assert len(counted) <= MOST_IN_A_FOLDER_OF_LAB, counted


def test_few_files() -> None:
    counted = [file for file in FILES if file.relative_to(PACKAGE).parts[0] not in ("cures", "losses")]
    assert len(counted) <= MOST_FILES


def test_a_file_name_occurs_once() -> None:
    """Commands are named like what they call, and the files of experiments like each other's."""
    experiments = PACKAGE / "lab" / "experiments"
    counted = [p.name for p in FILES if p.parent != PACKAGE / "cli" and experiments not in p.parents]
    assert [name for name, count in Counter(counted).items() if count > 1 and not name.startswith("__")] == []


def test_no_package_is_named_like_a_public_function() -> None:
    names = [name.removesuffix(".py") for name in entries(PACKAGE) if "." not in name.removesuffix(".py")]
    assert [name for name in names if not name.startswith("__") and callable(getattr(uncollapse, name))] == []
