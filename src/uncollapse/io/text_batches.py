"""Make batches of token ids from lines of text."""

import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import islice
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.io.files import expand_user

LENGTH = 128  # tokens of a text, unless asked otherwise


def built_in_sentences() -> list[str]:
    """120 plain English sentences that come with the package."""
    return _filled((files("uncollapse.io") / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines())


def read_lines(source: str, limit: int | None = None) -> list[str]:
    """The texts of a file, one a line, or of the standard input for "-"; blank lines are skipped."""
    try:
        if source == "-":
            lines = _filled(sys.stdin, limit)
        else:
            with expand_user(source).open(encoding="utf-8") as file:
                lines = _filled(file, limit)
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise UsageError(f"The text {source} cannot be read: {error.strerror}.") from error
    if not lines:
        raise UsageError(f"{'The standard input' if source == '-' else source} has no text; give one text a line.")
    return lines


def _filled(lines: Iterable[str], limit: int | None = None) -> list[str]:
    return list(islice((line.strip() for line in lines if line.strip()), limit))


def token_limit(tokenizer: Any, model: Any, asked: int | None) -> int:
    """How many tokens a text may have: what was asked for, within what the model can read."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, positions]
    most: int = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    if asked is not None and not 0 < asked <= most:
        raise UsageError(f"--max-length must be from 1 to {most} for this model, got {asked}.")
    return min(most, asked or LENGTH)


def token_batches(
    texts: list[str], tokenizer: Any, *, batch_size: int, max_length: int, decoder: bool
) -> Iterator[Any]:
    """Arguments of the model: input_ids, attention_mask and what else the tokenizer gives, padded on the right.

    decoder: give the same tokens to a decoder as well, for models that have an encoder and a decoder.
    """
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        encoded = tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        if start == 0:
            _check_known(encoded["input_ids"], tokenizer)
        if decoder:
            encoded["decoder_input_ids"] = encoded["input_ids"]
            encoded["decoder_attention_mask"] = encoded["attention_mask"]
        yield encoded


def example_tokens(text: str, tokenizer: Any, max_length: int) -> tuple[str, ...]:
    """The tokens of a text as a reader would write them."""
    ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
    return tuple(tokenizer.decode([number]) for number in ids)


def _check_known(ids: Any, tokenizer: Any) -> None:
    """Raise if most tokens are the unknown one: all alike, they would look like a collapse."""
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    real = [number for number in ids.flatten().tolist() if number not in special]
    unknown = sum(number == tokenizer.unk_token_id for number in real)
    if tokenizer.unk_token_id not in (tokenizer.eos_token_id, tokenizer.pad_token_id) and 2 * unknown > len(real):
        raise UsageError(
            f"The tokenizer does not know {unknown} of the first {len(real)} tokens. If the folder of the model has no "
            "tokenizer, save it there too; else give text of the model's own kind with --text, or pass --batches "
            "module:function if the model has another tokenizer."
        )
