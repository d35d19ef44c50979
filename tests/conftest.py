"""Settings of all tests, and the markers of whole files."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: a second thread costs more than it brings
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: tests of Ctrl-C would wait for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
MARKERS = {  # marker -> files and folders below tests/ (patterns of pathlib)
    "faults": ("faults/*",),
    "distributed": (
        "**/test_all_ranks.py",
        "**/test_*_ranks.py",
        "**/test_processes.py",
        "**/test_parallel.py",
        "lab/engine/test_sharding.py",
    ),
    "browser": ("report/test_browser.py", "report/test_policy.py"),
    "docs": ("docs/*", "examples/*", "experiments/*", "test_project_files.py", "test_release.py"),
    "slow": (
        "attachment/test_compile.py",
        "cli/test_completion.py",
        "cli/test_demo.py",
        "cli/test_embeddings.py",
        "cli/test_failures.py",
        "cli/test_presets.py",
        "cli/test_save_option.py",
        "cli/test_sweep.py",
        "cli/test_train.py",
        "cli/test_tune.py",
        "fuzz/*",
        "lab/engine/test_checkpoints.py",
        "lab/engine/test_loop.py",
        "lab/engine/test_resuming.py",
        "lab/experiments/*/*",
        "lab/runs/test_s*.py",
        "lab/search/*",
        "lab/test_recipe.py",
        "monitoring/test_callbacks.py",
        "pairwise/test_compiled.py",
        "zoo/*",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the markers of its file."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            file = item.path.relative_to(TESTS)
            for marker, patterns in MARKERS.items():
                if any(file.match(pattern) for pattern in patterns):
                    item.add_marker(marker)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """Files need not survive a power failure during tests: `tests/faults` looks at what is written in which order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _melted_imports() -> Iterator[None]:
    """Libraries that look for leaks at the end find none."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports(_melted_imports: None) -> None:
    """Each training collects garbage once, which would look through all libraries that were imported by then."""
    gc.collect()
    gc.freeze()
