"""python -m releasing VERSION [--dry-run]."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from releasing import packages, trial
from releasing.versions import CHANGELOG, Release, ReleaseError, current, notes

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Check, build and try a release; then commit and tag it, unless this is only a rehearsal."""
    parser = argparse.ArgumentParser(prog="python -m releasing", description=main.__doc__)
    parser.add_argument("version", nargs="?", help="such as 1.2.3; in a rehearsal, that of the source if not given")
    parser.add_argument("--dry-run", action="store_true", help="do all but the commit and the tag")
    parser.add_argument("--no-trial", action="store_true", help="with --dry-run: build and check only")
    asked = parser.parse_args()
    if not asked.dry_run and (asked.version is None or asked.no_trial):
        parser.error("a release needs a version and its trial: make release VERSION=1.2.3")
    release = Release(asked.version or current(ROOT), datetime.now(UTC).date().isoformat())
    try:
        _release(release, rehearsal=asked.dry_run, without_trial=asked.no_trial)
    except ReleaseError as error:
        print(f"There is no release: {error}", file=sys.stderr)
        return 1
    return 0


def _release(release: Release, *, rehearsal: bool, without_trial: bool) -> None:
    if not rehearsal:
        _check_git(release)
    edits = {} if rehearsal and release.is_made(ROOT) else release.files(ROOT)
    with tempfile.TemporaryDirectory(prefix="uncollapse-release-") as name:
        copy, out, folder = (Path(name) / part for part in ("source", "dist", "trial"))
        packages.copied(ROOT, copy)
        for path, text in edits.items():
            (copy / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
        made = _packages(copy, out, release)
        if not without_trial:
            folder.mkdir()
            trial.tried(made[0], copy, folder, release.version)
        _keep(made)
    if rehearsal:
        print(f"{release.version} could be released. Nothing was changed; dist/ has the packages.")
        return
    _commit(release, edits)


def _packages(copy: Path, out: Path, release: Release) -> list[Path]:
    wheel, sdist = packages.built(copy, out, "wheel", "sdist")
    counts = packages.check_wheel(wheel, copy, release.version), packages.check_sdist(sdist, copy, release.version)
    for path, count in zip((wheel, sdist), counts, strict=True):
        print(f"  {path.name}: {count} files, {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)
    return [wheel, sdist]


def _keep(made: list[Path]) -> None:
    (ROOT / "dist").mkdir(exist_ok=True)
    for path in made:
        shutil.copy2(path, ROOT / "dist" / path.name)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _check_git(release: Release) -> None:
    if changed := _git("status", "--porcelain").splitlines():
        raise ReleaseError(
            f"there are changes that are not committed, such as {changed[0].strip()}; commit them first."
        )
    if _git("tag", "--list", release.tag).strip():
        raise ReleaseError(f"the tag {release.tag} is there already; take a later version.")


def _commit(release: Release, edits: dict[Path, str]) -> None:
    for path, text in edits.items():
        path.write_text(text, encoding="utf-8")
    said = notes(edits[ROOT / CHANGELOG], release.version)
    _git("commit", "--quiet", "--message", f"Release {release.version}", "--", *map(str, edits))
    _git("tag", "--annotate", release.tag, "--message", f"uncollapse {release.version}\n\n{said}", "--cleanup=verbatim")
    print(
        f"{release.version} is committed and tagged as {release.tag}; dist/ has the packages. Push both when you like."
    )


if __name__ == "__main__":
    sys.exit(main())
