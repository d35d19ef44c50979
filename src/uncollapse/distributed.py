"""Several processes: who they are, how they meet and part, and what rank zero does for all of them.

`torchrun` or `accelerate launch` starts the processes, and `join_group` makes them a group of `torch.distributed`. A
process that fails records its failure, reports it to the user and exits. The others notice when they next communicate
with it, and exit as well. The functions import torch: the command line asks about its launcher before it needs torch.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by a launcher for each process
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # by which libraries recognize a launch
FAILED, DONE, REPORTED = "uncollapse/failed", "uncollapse/done", "uncollapse/reported"  # keys in the shared store
GRACE = timedelta(seconds=20)  # for rank 0 to finish its work; torchrun gives 30
POLL_SECONDS = 0.1  # between two checks whether rank 0 is done
LOST = (
    "Error: another process of this run ended unexpectedly, so this one stops as well. Saved work is kept: run the "
    "same command again to resume."
)

_store: Any = None  # the key-value store that all processes share, once they are connected
_failed = False  # whether this process exits with an error, its own or another's


class PeerError(RuntimeError):
    """Another process failed, so this one stops. The message names that process and its error."""


def is_peer_error(error: BaseException) -> bool:
    """Return whether an error means that another process failed or can no longer be reached."""
    if isinstance(error, PeerError):
        return True
    from torch import distributed

    from_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)  # gloo has no error class of its own
    return distributed.is_available() and world_size() > 1 and (from_gloo or isinstance(error, distributed.DistError))


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn errors of communication with another process into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not is_peer_error(error):
            raise
        raise PeerError("Another process of this run has stopped, so this one stops as well.") from error


def world_size() -> int:
    """Return the number of processes in the group; 1 without a group."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in the group, counted from 0."""
    from torch import distributed

    return distributed.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Return whether this process measures and writes for all: it is rank 0, or the only process."""
    return rank() == 0


def on_rank_zero(work: Callable[[], T], what: str = "The work on rank 0") -> T:
    """Call `work` in rank 0 and return its result in all processes, which must all call this.

    If `work` fails, rank 0 raises its error and the others raise a PeerError that starts with `what`.
    """
    if world_size() == 1:
        return work()
    from torch import distributed

    message: list[Any] = [None, None]  # result, error
    failure: Exception | None = None
    if is_rank_zero():
        try:
            message[0] = work()
        except Exception as error:  # the others wait for a message: send it before raising
            failure, message[1] = error, f"{type(error).__name__}: {error}"
    distributed.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[1] is not None:
        raise PeerError(f"{what} failed in the first process: {message[1]}")
    result: T = message[0]
    return result


def gather_objects(value: T) -> list[T]:
    """Return the values of all processes in the order of their ranks. Values are pickled: keep them small."""
    found: list[Any] = [None] * world_size()
    if len(found) == 1:
        return [value]
    from torch import distributed

    distributed.all_gather_object(found, value)
    return found


def check_alike(*tensors: "Tensor") -> None:
    """Raise ValueError in all processes if their rows cannot be gathered: other features, or float32 and float64.

    A collective operation on tensors that differ would abort the process. Half precision is gathered as float32.
    """
    if world_size() == 1:
        return
    import torch
    from torch import distributed

    own = [number for x in tensors for number in (x.dim(), x.shape[-1] if x.dim() else 0, x.dtype == torch.float64)]
    found = [torch.zeros(len(own), dtype=torch.int64, device=tensors[0].device) for _ in range(world_size())]
    distributed.all_gather(found, torch.tensor(own, dtype=torch.int64, device=tensors[0].device))
    all_facts = [facts.tolist() for facts in found]
    for start in range(0, len(own), 3):
        each = [tuple(facts[start : start + 3]) for facts in all_facts]
        if len(set(each)) > 1:
            said = [f"{dims}-d {'float64' if double else 'float32'} of {width}" for dims, width, double in each]
            raise ValueError(
                "gather=True joins the rows of all processes, which must have the same dimensions, features and dtype; "
                f"got, by rank: {', '.join(said)} features. Give every process tensors of one kind."
            )


def merge_on_rank_zero(part: Any) -> Any:
    """Merge the parts of all processes with their method `merge`; rank 0 returns the whole, the others some of it.

    Pairs of processes merge, then pairs of pairs: each sends its part once, and none ever holds more than two.
    """
    from torch import distributed

    step = 1
    while step < world_size():
        if rank() % (2 * step):
            distributed.send_object_list([part], dst=rank() - step)
            return part
        if rank() + step < world_size():
            found: list[Any] = [None]
            distributed.recv_object_list(found, src=rank() + step)
            part = part.merge(found[0])
        step *= 2
    return part


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each number over all processes, identical to the last digit in all of them."""
    if world_size() == 1:
        return [float(value) for value in values]
    import torch
    from torch import distributed

    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"  # NCCL supports no other device
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return [float(value) for value in total.tolist()]


def gather_rows(x: "Tensor") -> "Tensor":
    """Return the rows (n, d) of all processes in rank order, without a gradient; the numbers of rows may differ."""
    if world_size() == 1:
        return x.detach()
    import torch
    from torch import distributed

    sizes = torch.zeros(world_size(), dtype=torch.int64, device=x.device)
    sizes[rank()] = len(x)
    distributed.all_reduce(sizes)
    padded = torch.cat([x.detach(), x.new_zeros(int(sizes.max()) - len(x), *x.shape[1:])])  # all send as many rows
    parts = [torch.empty_like(padded) for _ in range(world_size())]
    distributed.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])


def launch_size() -> int:
    """Return the number of processes that a launcher started; 1 without one. torch is not needed."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCH_VARIABLES) else 1


def local_launch_size() -> int:
    """Return how many of the launched processes share the cores of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launch_size() > 1 else 1


def is_launch_rank_zero() -> bool:
    """Return whether this is the first launched process, or the only one; also before they are connected."""
    return launch_size() == 1 or os.environ["RANK"] == "0"


def connect() -> None:
    """Find the store that all processes can read and write; does nothing without a launcher."""
    global _store
    if launch_size() == 1 or _store is not None:
        return
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    _store = distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else None
    if _store is None:
        _store, _, _ = next(rendezvous("env://"))


def join_group(device: str | None = None) -> None:
    """Form a group of `torch.distributed` with the other processes; does nothing without a launcher.

    Args:
        device: "cpu" if the work is done on the CPU although there are GPUs.
    """
    if launch_size() == 1:  # also in a rank 0 that works alone, see `wait_for_rank_zero`
        return
    connect()
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    on_gpu = torch.cuda.is_available() and device in (None, "auto", "cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    distributed.init_process_group(backend, store=_store, rank=int(os.environ["RANK"]), world_size=launch_size())


def wait_for_rank_zero() -> bool:
    """Return False in rank 0, which works alone from now on, and True in the others, once rank 0 is done.

    This is for work that cannot be shared. If rank 0 fails, the others raise a PeerError.
    """
    connect()
    if is_launch_rank_zero():
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        return False
    while not _store.check([DONE]):
        if _store.check([FAILED]):
            raise PeerError("The first process failed.")
        time.sleep(POLL_SECONDS)  # rather than waiting in the store, where Ctrl-C has no effect
    return True


def leave_group() -> None:
    """Leave the other processes: rank 0 records that it is done, and the others wait for that.

    A launcher ends all processes as soon as one exits with an error, while rank 0 may still be writing.
    """
    global _store
    if _store is None:
        return
    from torch import distributed

    store, _store = _store, None
    if not _failed:  # otherwise the others wait for this process, and notice when it is gone
        with suppress(RuntimeError):  # the process that hosts the store is gone
            if is_launch_rank_zero():
                store.set(DONE, "")
            else:
                store.wait([DONE], GRACE)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def failure_message(error: BaseException, message: str) -> str:
    """Record the failure of this process for the others, and return what to show the user of it.

    Args:
        error: the error that ends this process.
        message: how it is worded for the user.

    Returns:
        The message; "" if another process shows it.
    """
    global _failed
    if _store is None:
        return message
    _failed = True
    try:
        if is_peer_error(error):
            message = "" if _store.check([FAILED]) else LOST
        else:
            _store.set(FAILED, message)
    except RuntimeError:
        return LOST if is_peer_error(error) else message
    return message if message and is_first_to_report(message) else ""


def is_first_to_report(message: str) -> bool:
    """Return whether no other process has reported this message, so that the user sees it once."""
    if _store is None:
        return True
    digest = hashlib.sha256(message.encode("utf-8", "surrogatepass")).hexdigest()
    try:
        return bool(_store.add(f"{REPORTED}/{digest}", 1) == 1)
    except RuntimeError:
        return True
