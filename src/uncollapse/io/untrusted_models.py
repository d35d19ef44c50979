"""Guard against models of strangers: the files that are read, the code that they name, the memory that they ask for."""

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from uncollapse.errors import UsageError
from uncollapse.io.files import read_config
from uncollapse.io.loading import fixed_seed

TEXTS = (".json", ".jinja", ".model", ".txt")  # what libraries read whole
LARGEST_TEXT = 2**28  # bytes; the largest tokenizers have some 2**25
CONFIG_NAMES = ["*config.json", "config_*.json", "modules.json"]  # patterns of fnmatch
COUNTS = re.compile(r"(layers?|depths?|blocks?|groups|stages|experts|labels)$")  # of what is built one by one
LARGEST_COUNT = 10**6
ATTENTION = re.compile(r"(paged\|)?(eager|sdpa|flex_attention|flash_attention_\d)")  # all others are code on a hub
KERNELS = ("allow_all_kernels", "kernel_config", "use_kernels")
MOST_TENSORS = 10**5
QUANTIZED = 0.5  # bytes that a quantized weight has at least


def check_folder(folder: Path) -> None:
    """Raise UsageError if files of a model, or of a folder in it, cannot be read safely.

    The libraries that read them would wait for a pipe, and read a device or a text of any size whole. Configs must
    not name code on a hub, or more layers than can be built.
    """
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        with suppress(OSError):  # a link to a file that was not downloaded
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
                raise UsageError(f"{path} is not a regular file; remove it, or name the folder of a saved model.")
            if path.suffix in TEXTS and facts.st_size > LARGEST_TEXT:
                raise UsageError(f"{path} has {facts.st_size:,} bytes; such a file has at most {LARGEST_TEXT:,}.")
            if stat.S_ISREG(facts.st_mode) and any(fnmatch(path.name, pattern) for pattern in CONFIG_NAMES):
                _check_values(read_config(path), path)


def _check_values(config: Any, path: Path) -> None:
    """Raise UsageError for values that load code, and for numbers of layers that never end."""
    for name, value in _values(config):
        if name.endswith(KERNELS) and value:
            raise UsageError(f"{path} asks for code on a hub ({name}), which is not run; remove that entry.")
        if "attn_implementation" in name and isinstance(value, str) and not ATTENTION.fullmatch(value):
            raise UsageError(
                f"{path} names the attention {value!r}, which may be code on a hub and is not run; write sdpa or eager."
            )
        if isinstance(value, int) and value > LARGEST_COUNT and COUNTS.search(name):
            raise UsageError(f"{path} has more {name} than any model: at most {LARGEST_COUNT:,} can be built.")


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config with their dotted names; those of a list have its name."""
    left = [("", config)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}.{key}".strip("."), item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(name, item) for item in value]
        else:
            yield name, value


@contextmanager
def bounded_size(place: str, quantized: bool = False) -> Iterator[None]:
    """Raise UsageError as soon as the models that this thread builds have more parameters than fit into memory.

    Args:
        place: the model's name in the error.
        quantized: the weights become smaller after they are declared.
    """
    thread, memory = threading.get_ident(), available_memory()
    sizes: dict[tuple[int, str], float] = {}
    total = 0.0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        if parameter is None or threading.get_ident() != thread:
            return
        key, old = (id(module), name), sizes.get((id(module), name), 0.0)  # loaded weights replace declared ones
        sizes[key] = parameter.numel() * (QUANTIZED if quantized else parameter.element_size())
        total += sizes[key] - old
        if total > memory:
            raise UsageError(
                f"{place} declares a model of more than {total / 1e9:,.1f} GB, such as {name} of shape "
                f"{tuple(parameter.shape)}; {memory / 1e9:,.1f} GB of memory are free. Check its config.json; "
                "--dtype bfloat16 halves the size of a model in float32."
            )
        if len(sizes) > MOST_TENSORS:
            raise UsageError(f"{place} declares a model of more than {MOST_TENSORS:,} tensors. Check its config.json.")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_size(build: Callable[[], object], place: str) -> None:
    """Raise UsageError if a model has more parameters than fit into memory, before any is taken.

    build: a function that builds the model; it is called on torch's meta device, whose tensors have no content.
    """
    try:
        with fixed_seed(), torch.device("meta"), bounded_size(place):
            build()
    except UsageError:
        raise
    except Exception:  # not every model can be built there: what is wrong shows when it is built in earnest
        return


def available_memory() -> float:
    """Return the bytes of memory that can be taken, of the machine or of its container; infinite if nothing says it."""
    found = [float("inf")]
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError, IndexError):  # Linux; what its page cache holds can be freed
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")))
    with suppress(OSError, ValueError):  # "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found)
