"""Run a model that somebody else wrote in order to inspect it, and leave it as it was.

Models of sentence-transformers take texts or features, and return a mapping with the embeddings.
"""

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.errors import UsageError

Call = Callable[[nn.Module, Any], Any]

_one_at_a_time = threading.RLock()  # modes, random states and the compiler's stance belong to the whole process
_inspections = threading.local()  # count: how many inspections this thread is running
BATCH = 32  # texts that are read at a time, if they come one by one


@contextmanager
def inspection_mode(model: nn.Module, device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Run in evaluation mode, without gradients and compiled code, on a device; restore everything afterwards.

    Yields the device for the batches. The random states of the CPU and of the model's accelerators are restored too.
    An inspection in another thread waits until this one has ended.
    """
    with _one_at_a_time, _inspect(model, device) as target:
        yield target


@contextmanager
def _inspect(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Open `inspection_mode`, in the only thread that does."""
    modes = [(module, module.training) for module in model.modules()]
    devices = dict.fromkeys(tensor.device for tensor in [*model.parameters(), *model.buffers()])
    homes = [device for device in devices if device.type != "meta"]  # offloaded weights are loaded when they are used
    if devices and not homes:
        raise ValueError("The model has shapes but no weights: all of it is on the device meta. Load it first.")
    home = next(iter(homes), torch.device("cpu"))
    target = torch.device(device) if device is not None else home
    if target != home and len(homes) > 1:
        raise ValueError(
            f"The model is on several devices ({', '.join(sorted(map(str, homes)))}) and cannot be moved to {target}; "
            "leave out device."
        )
    with _count_inspection(), _random_states({home, target}), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            model.eval()
            if target != home:
                model.to(target)
            yield target
        finally:
            if target != home:
                model.to(home)
            for module, mode in modes:
                module.training = mode


@contextmanager
def _count_inspection() -> Iterator[None]:
    before = getattr(_inspections, "count", 0)
    _inspections.count = before + 1
    try:
        yield
    finally:
        _inspections.count = before


def is_inspecting() -> bool:
    """Return whether this thread runs a model only to inspect it, not for its user."""
    return not torch.compiler.is_compiling() and getattr(_inspections, "count", 0) > 0


@contextmanager
def _random_states(devices: set[torch.device]) -> Iterator[None]:
    kinds = {device.type for device in devices} - {"cpu", "meta"}
    kind = next(iter(kinds), "cuda")
    numbers = [d.index or 0 for d in devices if d.type == kind]
    with torch.random.fork_rng(devices=numbers, device_type=kind):
        yield


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, whose parts have the names that the user knows."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it was compiled."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def reset_compiled() -> None:
    """Reset compiled code, which does not notice added or removed hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def class_names(model: nn.Module) -> set[str]:
    """Return the names of the classes of all modules of a model, and of their base classes."""
    return {kind.__name__ for module in model.modules() for kind in type(module).__mro__}


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device."""
    if hasattr(batch, "to"):  # tensors, HuggingFace encodings, PyG data
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [move_to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def check_model(model: Any) -> None:
    """Raise ValueError if a model is not a module, such as the name of one."""
    if not isinstance(model, nn.Module):
        load = "Load it first, such as with AutoModel.from_pretrained, or use the command `uncollapse diagnose`."
        other = "For activations or embeddings that you have, there are `diagnose_activations` and `diagnose_rows`."
        hint = load if isinstance(model, str | os.PathLike) else other
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}. {hint}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "The layers of a TorchScript module cannot be watched while it runs. Pass the module that was scripted or "
            "traced; its weights can be loaded with load_state_dict(scripted.state_dict())."
        )


def is_empty(batch: Any) -> bool:
    """Return whether a batch is an empty list, or has tensors and none of them holds a number."""
    if isinstance(batch, tuple | list) and not batch:
        return True
    tensors = list(_tensors(batch))
    return bool(tensors) and all(tensor.numel() == 0 for tensor in tensors)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch; of a graph, its nodes."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
    elif isinstance(getattr(batch, "x", None), Tensor):
        yield batch.x


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch.

    A mapping is passed as arguments by name, without those that the model does not take (labels, indices). Of a tuple
    or list the model gets as many elements as it requires, so the images of (images, labels). A PyG data object is
    passed whole if the model requires one argument, or else as x, edge_index, batch and other attributes by name.
    Anything else is the only argument. A SentenceTransformer takes texts, or features.
    """
    if is_sentence_model(model):
        home = next((p.device for p in model.parameters()), torch.device("cpu"))
        return model(move_to_device(read_batch(model, batch), home))
    try:
        return _call(model, batch)
    except (AttributeError, TypeError) as error:
        kind = _first_kind(batch)
        if issubclass(kind, str | bytes):
            remedy = 'Tokenize it: tokenizer(texts, padding=True, return_tensors="pt")'
            raise ValueError(
                f"The batch is text, and {type(model).__name__} failed on it ({error}). {remedy}."
            ) from error
        if kind.__module__ == "numpy":
            remedy = "Convert them with torch.from_numpy"
            raise ValueError(f"The batch holds NumPy arrays, and the model takes tensors. {remedy}.") from error
        raise


def _first_kind(batch: Any) -> type:
    """Return the type of the first thing in a batch."""
    while isinstance(batch, Mapping | tuple | list) and len(batch):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return type(batch)


def _call(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch, see `run`."""
    parameters = inspect.signature(model.forward).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if hasattr(batch, "edge_index") and hasattr(batch, "keys") and not isinstance(batch, Tensor):
        required = [p for p in positional if p.default is p.empty]
        if len(required) == 1 and required[0].name != "x":
            return model(batch)
        batch = {key: getattr(batch, key) for key in parameters if getattr(batch, key, None) is not None}
    if isinstance(batch, Mapping):
        known = {key: value for key, value in batch.items() if key in named or not named}
        if not known:
            raise ValueError(
                f"The batch has {', '.join(map(str, batch))}, and the model takes {', '.join(named)}. "
                "Rename the entries, or pass call=lambda model, batch: …"
            )
        return model(**known)
    if isinstance(batch, tuple | list):
        wanted = sum(p.default is p.empty for p in positional)
        return model(*batch[: max(1, wanted)])
    return model(batch)


WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model inside `torch.compile`, DistributedDataParallel and DataParallel, in any order."""
    while True:
        inner = model.module if isinstance(model, WRAPPERS) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_unsharded(model: nn.Module) -> None:
    """Raise if the weights are sharded over processes: one process alone cannot run such a model."""
    kinds = class_names(model)
    sharded = any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters())
    if sharded or kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise ValueError(
            "The model's weights are sharded over processes (FSDP, tensor parallel or ZeRO 3), and one process alone "
            "runs it here. Gather a checkpoint and use `uncollapse diagnose` on it instead."
        )


def is_sentence_model(model: nn.Module) -> bool:
    """Return whether a model is a SentenceTransformer; the library is not imported for this."""
    kinds = type(model).__mro__
    return any(k.__name__ == "SentenceTransformer" and k.__module__.startswith("sentence_transformers") for k in kinds)


def read_batch(model: Any, batch: Any) -> dict[str, Any]:
    """Return the features of a batch: texts as `model.encode` reads them, with the default prompt, or features."""
    if isinstance(batch, Mapping):
        return dict(batch)  # the modules of the model add to it
    texts = [batch] if isinstance(batch, str) else list(batch) if isinstance(batch, list | tuple) else None
    if texts is None:
        raise UsageError(
            f"A SentenceTransformer reads batches of texts, or the features of model.preprocess(texts), got a "
            f"{type(batch).__name__}."
        )
    name = getattr(model, "default_prompt_name", None)
    prompt = None if name is None else model.prompts.get(name)
    return dict(model.preprocess(texts, prompt=prompt))


def sentence_embeddings(output: Any) -> Tensor | None:
    """Return the embeddings (b, d) in what a SentenceTransformer returned."""
    found = output.get("sentence_embedding") if isinstance(output, Mapping) else None
    return found if isinstance(found, Tensor) and found.dim() == 2 else None


def group_texts(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, with texts that come one by one in lists of 32."""
    waiting: list[str] = []
    for batch in batches:
        if isinstance(batch, str):
            waiting.append(batch)
        if waiting and (len(waiting) == BATCH or not isinstance(batch, str)):
            yield waiting
            waiting = []
        if not isinstance(batch, str):
            yield batch
    if waiting:
        yield waiting
