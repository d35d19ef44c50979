"""Processes that `torchrun` or `accelerate launch` started: they meet, say things once, and stop together.

A process that fails writes down that it did, tells the user and leaves. The others notice that it is gone when they
next talk to it, wherever that is, and leave as well. torch is imported only where there was a launcher.
"""

import hashlib
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

FACTS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher tells each process
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # those by which libraries see that there was one
FAILED, DONE, SAID = "uncollapse/failed", "uncollapse/done", "uncollapse/said"  # keys of what all processes can read
GRACE = timedelta(seconds=20)  # for the first process to end what it does; torchrun gives 30
LOOK = 0.1  # seconds between two looks whether the first is done
LOST = (
    "Error: another process of this run came to a sudden end, so this one stops as well. What was saved is kept: the "
    "same command goes on from there."
)

_met: Any = None  # the store that all processes can read and write, once they have met
_failed = False  # whether this process leaves with an error, its own or another's


def launched() -> int:
    """How many processes a launcher started; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in FACTS) else 1


def is_first() -> bool:
    """Whether this is the first of them, or the only one; also before they have met."""
    return launched() == 1 or os.environ["RANK"] == "0"


def on_this_machine() -> int:
    """How many of them share the cores of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() > 1 else 1


def meet() -> None:
    """Find the store that all processes can read and write; nothing happens without a launcher."""
    global _met
    if launched() == 1 or _met is not None:
        return
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    _met = distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else None
    if _met is None:
        _met, _, _ = next(rendezvous("env://"))


def join(device: str | None = None) -> None:
    """Be a group of `torch.distributed` with the other processes; nothing happens without a launcher.

    device: "cpu" if the work is on the processor although there are GPUs.
    """
    if launched() == 1:  # also in a first process that works alone, see `left_to_first`
        return
    meet()
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    on_gpu = torch.cuda.is_available() and device in (None, "auto", "cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    distributed.init_process_group(backend, store=_met, rank=int(os.environ["RANK"]), world_size=launched())


def left_to_first() -> bool:
    """False in the first process, which from now on is alone; True in the others, once the first one is done.

    For work that cannot be shared. If the first one fails, the others raise an ElsewhereError.
    """
    from uncollapse.distributed import ElsewhereError

    meet()
    if is_first():
        for name in PLACES:
            os.environ.pop(name, None)
        return False
    while not _met.check([DONE]):
        if _met.check([FAILED]):
            raise ElsewhereError("The first process failed.")
        time.sleep(LOOK)  # and not in the store, where Ctrl-C would not be heard
    return True


def leave() -> None:
    """Part from the others: the first says that it is done, and the others wait for that.

    A launcher ends all processes as soon as one has left with an error: the first may still be writing.
    """
    global _met
    if _met is None:
        return
    from torch import distributed

    store, _met = _met, None
    if not _failed:  # else others wait for this process, and notice when it is gone
        with suppress(RuntimeError):  # whoever kept the store is gone
            if is_first():
                store.set(DONE, "")
            else:
                store.wait([DONE], GRACE)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def to_say(error: BaseException, words: str) -> str:
    """What this process tells the user of an error, of which the others learn; nothing, if another one tells it."""
    global _failed
    if _met is None:
        return words
    from uncollapse.distributed import is_elsewhere

    _failed = True
    try:
        if is_elsewhere(error):
            words = "" if _met.check([FAILED]) else LOST
        else:
            _met.set(FAILED, words)
    except RuntimeError:
        return LOST if is_elsewhere(error) else words
    return words if words and is_first_to_say(words) else ""


def is_first_to_say(words: str) -> bool:
    """Whether no other process has said this before: what all want to tell the user is told once."""
    if _met is None:
        return True
    digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()
    try:
        return bool(_met.add(f"{SAID}/{digest}", 1) == 1)
    except RuntimeError:
        return True
