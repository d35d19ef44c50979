"""Read a stream as checked chunks of rows, and read and write the stored states of its statistics."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from uncollapse.errors import NotFiniteError
from uncollapse.pairwise import numerics

T = TypeVar("T")
U = TypeVar("U")
CHUNK = 1024  # rows per chunk: bounds the memory, and the rounding inside one matrix product


def flat_rows(x: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return x as rows (n, d) and mask as (n,), checked."""
    numerics.check_float(x, "x")
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"x must have shape (..., {dim}), got {tuple(x.shape)}.")
    rows = x.detach().reshape(-1, dim)
    if mask is None:
        return rows, None
    numerics.check_mask(mask, x.shape[:-1])
    return rows, mask.expand(x.shape[:-1]).reshape(-1).to(x.device)


def chunks(flat: tuple[Tensor, Tensor | None], size: int = CHUNK) -> Iterator[Tensor]:
    """Yield the real rows, at most `size` at a time."""
    x, mask = flat
    for start in range(0, x.shape[0], size):
        part = slice(start, start + size)
        rows = x[part] if mask is None else x[part][mask[part]]
        if rows.shape[0] > 0:
            yield rows


def map_ahead(function: Callable[[T], U], items: Iterable[T], workers: int) -> Iterator[U]:
    """Yield function(item) of each item, in order. With several workers, threads compute as many in advance."""
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[U]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def next_view(pairs: Iterator[Any], number: int) -> Any:
    """Return the next second view, for the batch with this number."""
    try:
        return next(pairs)
    except StopIteration:
        raise ValueError(f"pairs ended after {number} batches; each batch needs its second view.") from None


def check_entries(flat: tuple[Tensor, Tensor | None], largest: float) -> None:
    """Raise NotFiniteError if a real entry is NaN, infinite or beyond `largest`."""
    most = torch.finfo(flat[0].dtype).max
    limit = min(largest, most)
    if most <= largest and all(bool(rows.sum().isfinite()) for rows in chunks(flat)):
        return  # one pass suffices: a sum is finite only if all terms are, and finite entries are within the limit
    bad = sum(int((~(rows.abs() <= limit)).sum()) for rows in chunks(flat))  # NaN is not ≤ anything
    if bad > 0:
        real = flat[0].numel() if flat[1] is None else int(flat[1].sum()) * flat[0].shape[1]
        raise NotFiniteError(
            f"Entries that are NaN, infinite or beyond {limit:.3g}: {bad} of {real}. Mask or remove their rows, or "
            "find the cause."
        )


def check_single(flat: tuple[Tensor, Tensor | None]) -> None:
    """Raise if real rows are not finite in float32, or if float32 would turn a row that is not 0 into zeros."""
    check_entries(flat, torch.finfo(torch.float32).max)
    if flat[0].dtype != torch.float64:
        return
    lost = sum(int((rows.any(-1) & ~rows.float().any(-1)).sum()) for rows in chunks(flat))
    if lost > 0:
        real = len(flat[0]) if flat[1] is None else int(flat[1].sum())
        raise ValueError(
            f"Rows that are not 0 but vanish in float32: {lost} of {real}. Multiply all rows by a large constant."
        )


def check_keys(state: Mapping[str, Tensor | int], names: tuple[str, ...]) -> None:
    """Raise ValueError unless the state has exactly these keys."""
    if set(state) != set(names):
        raise ValueError(f"The state must have the keys {', '.join(names)}, got {', '.join(sorted(state)) or 'none'}.")


def named_state(states: Mapping[str, Mapping[str, Tensor | int]]) -> dict[str, Tensor | int]:
    """Join several states: `count` of `moments` becomes `moments.count`."""
    return {f"{owner}.{name}": value for owner, state in states.items() for name, value in state.items()}


def nested_state(state: Mapping[str, Tensor | int], owner: str) -> dict[str, Tensor | int]:
    """Return the state that `named_state` stored under this name; empty if there is none."""
    begin = f"{owner}."
    return {name.removeprefix(begin): value for name, value in state.items() if name.startswith(begin)}


def read_integer(state: Mapping[str, Tensor | int], name: str) -> int:
    """Return an integer of the state, which storage may have turned into a tensor."""
    value = state[name]
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.int64:
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")
    return value


def read_number(state: Mapping[str, Tensor | int], name: str) -> float:
    """Return a number of the state, which is stored as a tensor."""
    return float(read_tensor(state, name, torch.float64, ()))


def read_tensor(
    state: Mapping[str, Tensor | int], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> Tensor:
    """Return a tensor of the state, finite and of the expected dtype and shape (None: any size)."""
    value = state[name]
    if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim != len(shape):
        raise ValueError(f"{name} must be a tensor of {dtype} with {len(shape)} dimensions, got {_describe(value)}.")
    if any(want not in (None, got) for want, got in zip(shape, value.shape, strict=True)):
        raise ValueError(f"{name} must have the shape {shape} (None: any), got {tuple(value.shape)}.")
    if not bool(value.isfinite().all()):
        raise NotFiniteError(f"{name} has entries that are NaN or infinite: this state cannot be used.")
    return value


def _describe(value: Tensor | int) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
