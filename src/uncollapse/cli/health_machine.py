"""What there is to compute on, and where files are written and kept."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from uncollapse.cli.health_findings import Finding
from uncollapse.io import files

DEVICE_GROUP, FILES = "Devices", "Files"
LITTLE = 2**30  # bytes of a disk
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
YES = ("1", "true", "yes", "on")


def _check_devices() -> Iterator[Finding]:
    """The processor and the accelerators that torch sees."""
    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    yield Finding(DEVICE_GROUP, "cpu", "good", threads)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding(DEVICE_GROUP, "cuda", "good" if names else "missing", ", ".join(names) or "torch sees no GPU")
    mps = torch.backends.mps.is_available()
    yield Finding(DEVICE_GROUP, "mps", "good" if mps else "missing", "there" if mps else "only on a Mac")
    several = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    words = "torch has gloo, so `torchrun` works" if several else "this torch is built without gloo"
    yield Finding(DEVICE_GROUP, "several processes", "good" if several else "missing", words)


def _check_folders() -> Iterator[Finding]:
    """Folders that are written to, and the hub's."""
    yield _folder("here", Path.cwd(), "results and reports go below this folder")
    yield _folder("cache", files.user_cache(), "what was fetched or made; UNCOLLAPSE_CACHE names another")
    if find_spec("huggingface_hub") is not None:
        yield _hub()
    yield _minilm()


def _folder(name: str, folder: Path, use: str) -> Finding:
    """Whether something can be written there; nothing is left behind."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        words = f"{folder} cannot be written to: {error.strerror}"
        return Finding(FILES, name, "bad", words, "work in another folder" if name == "here" else use)
    words = f"{folder}, {free / 2**30:.1f} GiB free: {use}"
    return Finding(FILES, name, "bad" if free < LITTLE else "good", words, "make room" if free < LITTLE else "")


def _hub() -> Finding:
    """Where models of the hub are kept, and whether others may be fetched. Nobody is asked over the network."""
    from huggingface_hub import constants

    kept = len(list(Path(constants.HF_HUB_CACHE).glob("models--*")))
    told = next((name for name in OFFLINE if os.environ.get(name, "").lower() in YES), None)
    words = f"{kept} models in {constants.HF_HUB_CACHE}"
    if told:
        return Finding(FILES, "hub", "missing", f"{words}; {told} is set, so no others are fetched", f"unset {told}")
    return Finding(FILES, "hub", "good", f"{words}; others are fetched by name (HF_HUB_OFFLINE=1 forbids it)")


def _minilm() -> Finding:
    """The real model that the demo diagnoses."""
    from uncollapse.cli.demo import INSTALL_MINILM, minilm_folder

    found = minilm_folder()
    words = "the real model of `uncollapse demo`"
    state, remedy = ("good", "") if found else ("missing", INSTALL_MINILM)
    return Finding(FILES, "MiniLM", state, words if found else f"{words} is not installed", remedy)  # type: ignore[arg-type]
