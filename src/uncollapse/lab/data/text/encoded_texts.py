"""Sentences as token ids: tokenized once, cached on disk, padded to the longest of each batch."""

import hashlib
import json
import warnings
from dataclasses import dataclass
from functools import cache as once
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from uncollapse.io import files
from uncollapse.lab.data.text.glue import Examples
from uncollapse.lab.runs.results import fingerprint

POOL = 50  # batches whose examples are sorted by length together
CHUNK = 10_000  # examples per call of the tokenizer, whose output takes far more memory than the ids
SEAL = "seal"  # entry of the file with the checksum of the others
KINDS = {"ids": torch.int32, "starts": torch.int64, "types": torch.uint8}


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of many examples, concatenated.

    Args:
        ids: Ids of all tokens.
        starts: Where each example starts, and where the last one ends.
        types: 0 for tokens of the first sentence and 1 for the second; None where the model does not take them.
        labels: One per example.
        padding: Id of the padding token.
    """

    ids: Tensor
    starts: Tensor
    types: Tensor | None
    labels: Tensor | None
    padding: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens of each example."""
        return self.starts.diff()

    def batch(self, numbers: Tensor, length: int | None = None) -> dict[str, Tensor]:
        """Return a model's inputs for some examples, padded to the longest, or to `length`."""
        counts = self.starts[numbers + 1] - self.starts[numbers]
        longest = max(counts.tolist(), default=0)
        size = longest if length is None else length
        if size < longest:
            raise ValueError(f"length must be at least {longest}, the longest example's, got {length}.")
        places = torch.arange(size)
        real = places < counts[:, None]  # (b, n)
        where = torch.where(real, self.starts[numbers][:, None] + places, 0)
        made = {
            "input_ids": torch.where(real, self.ids[where].long(), self.padding),
            "attention_mask": real.long(),
        }
        if self.types is not None:
            made["token_type_ids"] = torch.where(real, self.types[where].long(), 0)
        if self.labels is not None:
            made["labels"] = self.labels[numbers]
        return made


def encode(examples: Examples, tokenizer: Any, max_length: int, *, classes: bool, cache: Path | None) -> EncodedTexts:
    """Tokenize examples, or read their token ids from the cache.

    Args:
        examples: Sentences or pairs of sentences.
        tokenizer: Tokenizer of transformers.
        max_length: Largest number of tokens per example; the longer sentence of a pair is cut first.
        classes: Whether labels are class indices, not scores.
        cache: Folder of the cache; None: no cache.
    """
    path = None if cache is None else cache / "tokens" / f"{_key(examples, tokenizer, max_length)}.safetensors"
    encoded = None if path is None else _read_cache(path, len(examples))
    if encoded is None:
        encoded = _tokenize(examples, tokenizer, max_length)
        if path is not None:
            _write_cache(path, encoded)
    labels = None
    if examples.labels is not None:
        labels = torch.tensor(examples.labels, dtype=torch.long if classes else torch.float32)
    return EncodedTexts(encoded["ids"], encoded["starts"], encoded.get("types"), labels, int(tokenizer.pad_token_id))


def _tokenize(examples: Examples, tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    texts = [list(side) for side in (examples.first, examples.second) if side is not None]
    lengths, found = [0], dict[str, list[Tensor]]()
    for start in range(0, len(examples), CHUNK):
        sides = [side[start : start + CHUNK] for side in texts]
        made = tokenizer(*sides, truncation=True, max_length=max_length, padding=False)
        lengths += map(len, made["input_ids"])
        for name, its in (("ids", "input_ids"), ("types", "token_type_ids")):
            if its in made:
                found.setdefault(name, []).append(torch.tensor(list(chain.from_iterable(made[its])), dtype=KINDS[name]))
    return {name: torch.cat(chunks) for name, chunks in found.items()} | {"starts": torch.tensor(lengths).cumsum(0)}


def _key(examples: Examples, tokenizer: Any, max_length: int) -> str:
    """Return 32 hexadecimal digits of everything the token ids depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = json.dumps([tokenizer.get_vocab(), tokenizer.init_kwargs], sort_keys=True, default=str)
    else:
        kind = _without_call_state(backend.to_str())
    calls = f"{tokenizer.truncation_side} {tokenizer.model_input_names} {max_length} {examples.second is None}"
    digest = hashlib.sha256()
    for part in (type(tokenizer).__name__, kind, calls, *examples.first, *(examples.second or ())):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


def _without_call_state(description: str) -> str:
    """Return a tokenizer's description without what each call sets."""
    return json.dumps(json.loads(description) | {"truncation": None, "padding": None}, sort_keys=True)


def _read_cache(path: Path, examples: int) -> dict[str, Tensor] | None:
    """Return the cached token ids; None if there are none, or not those that were written: then they are made again."""
    try:
        found = load(path.read_bytes())
    except (OSError, SafetensorError):
        return None
    seal = found.pop(SEAL, None)
    if seal is None or not {"ids", "starts"} <= set(found) <= set(KINDS) or not torch.equal(seal, _checksum(found)):
        return None
    ids, starts = found["ids"], found["starts"]
    sound = all(tensor.dtype == KINDS[name] and tensor.dim() == 1 for name, tensor in found.items())
    sound = sound and len(starts) == examples + 1 and len(found.get("types", ids)) == len(ids)
    return found if sound and starts[0] == 0 and starts[-1] == len(ids) and bool((starts.diff() >= 0).all()) else None


def _checksum(tokens: dict[str, Tensor]) -> Tensor:
    """Return bytes that change when any token does: a single wrong bit on disk would make it another run."""
    return torch.tensor(list(fingerprint(tokens[name] for name in sorted(tokens)).encode()), dtype=torch.uint8)


def _write_cache(path: Path, tokens: dict[str, Tensor]) -> None:
    try:
        files.write(path, save(tokens | {SEAL: _checksum(tokens)}))
    except OSError as error:
        _warn(f"Token ids cannot be cached in {path.parent}: {error.strerror}. Each run tokenizes again.")


@once
def _warn(sentence: str) -> None:
    """Warn once: a run has several splits."""
    warnings.warn(sentence, stacklevel=4)


def length_buckets(lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Return batches in a random order, each of examples of similar length, so that there is little padding.

    Examples are shuffled, cut into pools of 50 batches, and sorted by length within each; then batches are shuffled.

    >>> [b.tolist() for b in length_buckets(torch.tensor([9, 1, 8, 2]), 2, torch.Generator().manual_seed(0))]
    [[1, 3], [2, 0]]
    """
    order = torch.randperm(len(lengths), generator=generator)
    pools = (pool[lengths[pool].argsort(stable=True)] for pool in torch.split(order, POOL * size))
    batches = [batch for pool in pools for batch in torch.split(pool, size)]
    return [batches[n] for n in torch.randperm(len(batches), generator=generator).tolist()]


def batches_by_length(lengths: Tensor, size: int) -> list[Tensor]:
    """Return batches of all examples by length, for an evaluation."""
    return list(torch.split(lengths.argsort(stable=True), size))
