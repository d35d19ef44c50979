"""The number of a release and its date, in the files that have them."""

import re
from dataclasses import dataclass
from pathlib import Path

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?")
SOURCE, CHANGELOG, CITATION = "src/uncollapse/__init__.py", "CHANGELOG.md", "CITATION.cff"
UNRELEASED = "## [Unreleased]"
SECTION = re.compile(r"^## \[([^]]+)\](?: - (\S+))?$", re.M)


class ReleaseError(Exception):
    """Why there is no release; the sentence says what to do."""


@dataclass(frozen=True)
class Release:
    """A release: its number, and its date as 2026-01-31."""

    version: str
    date: str

    def __post_init__(self) -> None:
        if not VERSION.fullmatch(self.version):
            raise ReleaseError(f"A version is three numbers, such as 1.2.3 or 1.2.3rc1, got {self.version!r}.")

    @property
    def tag(self) -> str:
        """Its name in git."""
        return f"v{self.version}"

    def is_made(self, root: Path) -> bool:
        """Whether the tree is that of the release already, as it is where its tag is."""
        changelog = (root / CHANGELOG).read_text(encoding="utf-8")
        return current(root) == self.version in [found[1] for found in SECTION.finditer(changelog)]

    def files(self, root: Path) -> dict[Path, str]:
        """What the files say after it, by their paths. ReleaseError if one of them is not ready."""
        edits = {SOURCE: self.bumped, CHANGELOG: self.dated, CITATION: self.cited}
        return {root / name: edit((root / name).read_text(encoding="utf-8")) for name, edit in edits.items()}

    def bumped(self, text: str) -> str:
        """The source with the version, which is its one place: the package's metadata is made from it."""
        return _once(r'^__version__ = ".*"$', f'__version__ = "{self.version}"', text, SOURCE)

    def cited(self, text: str) -> str:
        """The citation with the version and the date."""
        text = re.sub(r"^date-released: .*\n", "", text, flags=re.M)
        return _once(r"^version: .*$", f"version: {self.version}\ndate-released: {self.date}", text, CITATION)

    def dated(self, text: str) -> str:
        """The changelog with what was unreleased below the version and its date."""
        dates = {found[1]: found[2] for found in SECTION.finditer(text)}
        if UNRELEASED not in text:
            raise ReleaseError(
                f"{CHANGELOG} needs a section '{UNRELEASED}' with what is new; it has: {', '.join(dates)}."
            )
        if self.version in dates:
            raise ReleaseError(f"{CHANGELOG} has {self.version} already, of {dates[self.version]}; take a later one.")
        released = [name for name in dates if VERSION.fullmatch(name)]
        if released and order(self.version) <= max(map(order, released)):
            latest = max(released, key=order)
            raise ReleaseError(f"{self.version} does not come after {latest}, the latest in {CHANGELOG}.")
        if not notes(text, "Unreleased").strip():
            raise ReleaseError(f"'{UNRELEASED}' in {CHANGELOG} is empty; say what is new.")
        return text.replace(UNRELEASED, f"{UNRELEASED}\n\n## [{self.version}] - {self.date}", 1)


def order(version: str) -> tuple[int, ...]:
    """What versions are sorted by; a candidate comes before its release."""
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"A version is three numbers, such as 1.2.3 or 1.2.3rc1, got {version!r}.")
    return (*map(int, found.groups()[:3]), int(found[4]) if found[4] else 10**6)


def notes(changelog: str, version: str) -> str:
    """What the changelog says of a version."""
    for found in SECTION.finditer(changelog):
        if found[1] == version:
            after = SECTION.search(changelog, found.end())
            return changelog[found.end() : after.start() if after else None].strip() + "\n"
    raise ReleaseError(f"{CHANGELOG} has no section of {version}.")


def current(root: Path) -> str:
    """The version that the source has now."""
    found = re.search(r'^__version__ = "(.*)"$', (root / SOURCE).read_text(encoding="utf-8"), flags=re.M)
    if found is None:
        raise ReleaseError(f"{SOURCE} has no line '__version__ = …'.")
    return found[1]


def _once(pattern: str, line: str, text: str, name: str) -> str:
    changed, count = re.subn(pattern, line, text, flags=re.M)
    if count != 1:
        raise ReleaseError(f"{name} must have one line such as {pattern!r}, found {count}.")
    return changed
