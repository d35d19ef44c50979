"""Run models of sentence-transformers, which take texts or features, and return a mapping with the embeddings."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from uncollapse.errors import UsageError

BATCH = 32  # texts that are read at a time, if they come one by one


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
    if hasattr(model, "preprocess"):
        return dict(model.preprocess(texts, prompt=prompt))
    return dict(model.tokenize([(prompt or "") + text for text in texts]))  # before sentence-transformers 5.4


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
