"""The pieces of a release: version, changelog, packages, and that nothing is changed where something is wrong."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # what makes releases is no part of what is installed
from releasing import __main__ as command  # noqa: E402
from releasing import packages, snippets, trial  # noqa: E402
from releasing.versions import Release, ReleaseError, current, notes, order  # noqa: E402

CHANGES = """# Changelog

## [Unreleased]

### Added

- Something.

## [0.1.0] - 2026-01-02

- All of it.
"""
RELEASE = Release("0.2.0", "2026-03-04")


def test_the_version_is_in_one_place_of_the_source() -> None:
    text = RELEASE.bumped((ROOT / "src/uncollapse/__init__.py").read_text(encoding="utf-8"))
    assert text.count('__version__ = "0.2.0"') == 1
    assert text.replace("0.2.0", current(ROOT)) == (ROOT / "src/uncollapse/__init__.py").read_text(encoding="utf-8")
    with pytest.raises(ReleaseError, match="one line"):
        RELEASE.bumped("nothing")


def test_what_was_unreleased_gets_the_version_and_the_date() -> None:
    text = RELEASE.dated(CHANGES)
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n\n### Added\n\n- Something.\n\n## [0.1.0]" in text
    assert notes(text, "0.2.0") == "### Added\n\n- Something.\n"
    assert notes(text, "0.1.0") == "- All of it.\n"
    with pytest.raises(ReleaseError, match="is empty"):
        Release("0.3.0", "2026-03-05").dated(text)
    with pytest.raises(ReleaseError, match=r"9\.9\.9"):
        notes(text, "9.9.9")


@pytest.mark.parametrize(
    ("version", "text", "words"),
    [
        ("0.1.0", CHANGES, "has 0.1.0 already, of 2026-01-02"),
        ("0.0.9", CHANGES, "does not come after 0.1.0"),
        ("0.1.0rc1", CHANGES, "does not come after 0.1.0"),
        ("0.2.0", CHANGES.replace("Unreleased", "New"), r"needs a section '## \[Unreleased\]'.*it has: New, 0.1.0"),
    ],
)
def test_a_changelog_that_is_not_ready(version: str, text: str, words: str) -> None:
    with pytest.raises(ReleaseError, match=words):
        Release(version, "2026-03-04").dated(text)


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.3", "1.2.3.4", "1.2.3-beta", "latest"])
def test_what_is_no_version(version: str) -> None:
    with pytest.raises(ReleaseError, match="three numbers"):
        Release(version, "2026-03-04")
    with pytest.raises(ReleaseError, match="three numbers"):
        order(version)


def test_versions_are_ordered_by_their_numbers() -> None:
    mixed = ["1.0.0", "0.10.0", "0.10.0rc2", "0.10.1", "0.9.0", "0.10.0rc1"]
    assert sorted(mixed, key=order) == ["0.9.0", "0.10.0rc1", "0.10.0rc2", "0.10.0", "0.10.1", "1.0.0"]


def test_the_citation_follows() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    cited = RELEASE.cited(text)
    assert "\nversion: 0.2.0\ndate-released: 2026-03-04\n" in cited
    assert RELEASE.cited(cited) == cited


def test_all_files_of_this_tree_are_ready() -> None:
    changed = Release("999.0.0", "2026-03-04").files(ROOT)
    assert {path.relative_to(ROOT).as_posix() for path in changed} == {
        "src/uncollapse/__init__.py",
        "CHANGELOG.md",
        "CITATION.cff",
    }
    assert all("999.0.0" in text for text in changed.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release, without what tests and tools leave behind."""
    root = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("examples", "notebooks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    for name in packages.FILES - {"PKG-INFO"}:
        shutil.copy2(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("hatchling")
    wheel, sdist = packages.built(source, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return wheel, sdist


def test_the_packages_hold_what_they_should(built: tuple[Path, Path], source: Path) -> None:
    wheel, sdist = built
    version = current(source)
    assert wheel.name == f"uncollapse-{version}-py3-none-any.whl"
    assert packages.check_wheel(wheel, source, version) > 250
    assert packages.check_sdist(sdist, source, version) > 250
    with zipfile.ZipFile(wheel) as archive:
        facts = archive.read(f"uncollapse-{version}.dist-info/METADATA").decode()
        assert (
            "uncollapse = uncollapse.cli:app"
            in archive.read(f"uncollapse-{version}.dist-info/entry_points.txt").decode()
        )
    assert "License-Expression: Apache-2.0" in facts
    assert re.search(r"^Requires-Dist: timm>=1\.0\.31; extra == .timm.$", facts, flags=re.M)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("uncollapse/digits.npz", b"x", "differs from src/uncollapse in: uncollapse/digits.npz"),
        ("tests/test_it.py", b"", "differs from src/uncollapse in: tests/test_it.py"),
    ],
)
def test_what_does_not_belong_into_a_wheel(
    built: tuple[Path, Path], source: Path, tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    wheel = shutil.copy2(built[0], tmp_path / built[0].name)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, data)
    with pytest.raises(ReleaseError, match=re.escape(words)):
        packages.check_wheel(wheel, source, current(source))


def test_what_does_not_belong_into_the_source_archive(built: tuple[Path, Path], source: Path, tmp_path: Path) -> None:
    version, sdist = current(source), tmp_path / built[1].name
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / f"uncollapse-{version}"
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").touch()
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(folder, folder.name)
    with pytest.raises(ReleaseError, match=r"tests/test_it\.py"):
        packages.check_sdist(sdist, source, version)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("large.py", b" " * (packages.LARGEST + 1), "data does not belong"),
        ("data.npz", b"", "data does not belong"),
        ("place.py", b"ROOT", "is of this machine only"),
        ("place.py", b"TREE", "is of this machine only"),
    ],
)
def test_kinds_sizes_and_places_are_checked(
    source: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, words: str
) -> None:
    monkeypatch.setattr(packages, "TREE", Path("/some/where/tree"))
    content = {name: data.replace(b"ROOT", str(source.resolve()).encode()).replace(b"TREE", b"/some/where/tree")}
    with pytest.raises(ReleaseError, match=words):
        packages._check(Path("some.whl"), content, source, packages.KINDS)


def test_a_build_that_fails_is_told(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    with pytest.raises(ReleaseError, match="built"):
        packages.built(tmp_path, tmp_path / "dist", "wheel")


def test_only_files_that_git_would_know_are_copied(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "runs").mkdir(parents=True)
    for name in ("kept.py", "runs/litter.txt", "gone.py"):
        (here / name).write_text(name, encoding="utf-8")
    (here / ".gitignore").write_text("runs/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=here, check=True)
    subprocess.run(["git", "add", "."], cwd=here, check=True)
    (here / "gone.py").unlink()
    packages.copied(here, there)
    assert sorted(path.name for path in there.rglob("*")) == [".gitignore", "kept.py"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A tree to release from, with a changelog and packages that are made in no time."""
    root = tmp_path / "tree"
    (root / "src/uncollapse").mkdir(parents=True)
    (root / "src/uncollapse/__init__.py").write_text('__version__ = "0.1.0"\n', encoding="utf-8")
    (root / "CHANGELOG.md").write_text(CHANGES, encoding="utf-8")
    (root / "CITATION.cff").write_text("title: it\nversion: 0.1.0\n", encoding="utf-8")
    (root / ".gitignore").write_text("dist/\n", encoding="utf-8")

    def git(*arguments: str) -> str:
        options = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(
            ["git", *options, *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    def made(copy: Path, out: Path, release: Release) -> list[Path]:
        out.mkdir()
        assert current(copy) == release.version
        (out / "it.whl").touch()
        return [out / "it.whl"]

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "Begin")
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "t")
        monkeypatch.setenv(f"{name}_EMAIL", "t@example.org")
    monkeypatch.setattr(command, "ROOT", root)
    monkeypatch.setattr(command, "_packages", made)
    monkeypatch.setattr(trial, "tried", lambda *_: None)
    return git


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["releasing", *arguments])
    return command.main()


def test_a_release_is_a_commit_and_a_tag(repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "0.2.0") == 0
    assert repository("status", "--porcelain") == ""
    assert repository("log", "--format=%s").splitlines() == ["Release 0.2.0", "Begin"]
    told = repository("tag", "--list", "v0.2.0", "--format=%(contents)")
    assert "### Added\n\n- Something." in told
    assert '__version__ = "0.2.0"' in repository("show", "v0.2.0:src/uncollapse/__init__.py")
    assert (command.ROOT / "dist/it.whl").is_file()
    assert run(monkeypatch, "0.2.0") == 1


def test_a_rehearsal_changes_nothing(repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "0.2.0", "--dry-run") == 0
    assert repository("status", "--porcelain") == ""
    assert repository("tag") == ""


def test_a_tagged_tree_can_be_built_again(repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "0.2.0") == 0
    (command.ROOT / "dist/it.whl").unlink()
    assert run(monkeypatch, "--dry-run") == 0  # as the release workflow does
    assert (command.ROOT / "dist/it.whl").is_file()
    assert repository("status", "--porcelain") == ""
    assert run(monkeypatch, "0.1.0", "--dry-run") == 1


def test_nothing_is_changed_when_the_trial_fails(
    repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ReleaseError("The doctor is not content.")

    monkeypatch.setattr(trial, "tried", fails)
    assert run(monkeypatch, "0.2.0") == 1
    assert capsys.readouterr().err == "There is no release: The doctor is not content.\n"
    assert (repository("status", "--porcelain"), repository("tag")) == ("", "")


def test_a_tree_with_changes_or_a_tag_that_is_there_is_no_release(
    repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository("tag", "v0.2.0")
    assert run(monkeypatch, "0.2.0") == 1
    assert "the tag v0.2.0 is there already" in capsys.readouterr().err
    (command.ROOT / "new.py").touch()
    assert run(monkeypatch, "0.3.0") == 1
    assert "not committed, such as ?? new.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch)


def test_what_the_trial_runs_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport no_such_library\n```\n\n```python\nx = 1\n```\n", encoding="utf-8")
    here = str(Path(snippets.uncollapse.__file__).parent)
    snippets.main(here, "1", str(page))
    assert capsys.readouterr().out == "page.md 1: left out, it needs an extra\npage.md 2: runs\n"
    with pytest.raises(ModuleNotFoundError):
        snippets.main(here, "0", str(page))
    with pytest.raises(SystemExit, match="comes from"):
        snippets.main(str(tmp_path), "0", str(page))


def test_a_program_of_the_trial_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    environment = trial.Environment(tmp_path / "env", tmp_path, ROOT)
    code = "import os, sys; print(sys.path); print('PYTHONPATH' in os.environ); sys.exit(int(sys.argv[1]))"
    assert environment.run("python", "-c", code, "0").splitlines()[-1] == "False"
    with pytest.raises(ReleaseError, match=r"(?s)with 7.*False"):
        environment.run("python", "-c", code, "7")
