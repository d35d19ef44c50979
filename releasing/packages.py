"""The wheel and the source archive: how they are made, and what must and must not be in them."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from releasing.versions import ReleaseError

TREE = Path(__file__).resolve().parents[1]
LARGEST = 300_000  # bytes of a file; data would be larger
KINDS = {".py", ".typed", ".css", ".js", ".txt", ".html", ".toml", ".json", ".tsv", ".sha256"}  # of files in the wheel
FOLDERS = {"src", "examples", "notebooks"}  # of the source archive
FILES = {
    ".gitignore",  # hatch puts it there
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}


def copied(root: Path, to: Path) -> Path:
    """The files that git knows or would know, in another folder: what is built has no litter in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # deleted ones are still listed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def built(root: Path, out: Path, *kinds: str) -> list[Path]:
    """The packages of these kinds, "wheel" and "sdist". Nothing is downloaded for it."""
    options = [option for kind in kinds for option in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *options, "-d", str(out)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"The packages cannot be built: {done.stderr.strip() or done.stdout.strip()}")
    return sorted(out.iterdir(), key=lambda path: path.suffix != ".whl")


def check_wheel(wheel: Path, root: Path, version: str) -> int:
    """Raise unless it holds the whole package and nothing else; give the number of its files."""
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    about = f"uncollapse-{version}.dist-info/"
    inside = {name for name in content if not name.startswith(about)}
    ours = {path.relative_to(root / "src").as_posix() for path in _sources(root / "src" / "uncollapse")}
    if inside != ours:
        raise ReleaseError(f"{wheel.name} differs from src/uncollapse in: {', '.join(sorted(inside ^ ours)[:5])}.")
    for name in (f"{about}METADATA", f"{about}entry_points.txt", f"{about}licenses/LICENSE", "uncollapse/py.typed"):
        if name not in content:
            raise ReleaseError(f"{wheel.name} has no {name}.")
    _check(wheel, {name: content[name] for name in inside}, root, KINDS)
    return len(content)


def check_sdist(sdist: Path, root: Path, version: str) -> int:
    """Raise unless it holds what is needed to build and read, and neither data nor tests; give the number of files."""
    content: dict[str, bytes] = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None:
                content[member.name.removeprefix(f"uncollapse-{version}/")] = file.read()
    strange = sorted(n for n in content if n not in FILES and PurePosixPath(n).parts[0] not in FOLDERS)
    missing = sorted(FILES - content.keys())
    if strange or missing:
        raise ReleaseError(f"{sdist.name} has what it should not, {strange[:5]}, or lacks {missing[:5]}.")
    _check(sdist, content, root, {*KINDS, ".md", ".cff", ""})
    return len(content)


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _check(package: Path, content: dict[str, bytes], root: Path, kinds: set[str]) -> None:
    """Raise if a file is of a kind that does not belong there, is too large, or names a folder of this machine."""
    here = (root.resolve(), TREE, Path.home())  # what is built is a copy of the tree
    places = [str(place).encode() for place in here if len(place.parts) > 2]
    for name, data in content.items():
        if PurePosixPath(name).suffix not in kinds or len(data) > LARGEST:
            raise ReleaseError(f"{package.name} has {name} of {len(data)} bytes; data does not belong into it.")
        if place := next((place for place in places if place in data), None):
            raise ReleaseError(f"{package.name}: {name} names {place.decode()}, which is of this machine only.")
