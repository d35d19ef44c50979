"""Diagnose a sentence encoder, attach ContraNorm, train it for a few steps,
and compare.

    python examples/text.py                   # a tiny BERT with random weights
    python examples/text.py NAME_OR_FOLDER    # one from the Hub or a folder

It is trained without labels: two passes of a sentence, which differ by
dropout, should be close to each other and far from all other sentences
(SimCSE, arXiv 2104.08821). A few sentences show how it works; they do not
improve the encoder.
"""

import argparse
import sys
import tempfile

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import hf_models

SENTENCES = """The ferry leaves at noon. A boat departs at midday. Rain is likely in the hills. It may pour up there.
She tuned the old piano. He sold his first car. The bread is still warm. Nobody had locked the door. Two dogs sleep on
the stairs. The committee meets again on Friday. Their train was an hour late. We planted beans along the fence."""
TEXTS = [f"{text.strip()}." for text in SENTENCES.replace("\n", " ").split(".") if text]


def encoder(place: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model, and the sentences as its arguments."""
    if place is not None:
        origin = hf_models.Origin(place)
        model, _, _ = hf_models.load_hf_model(origin, random_weights=False, dtype=torch.float32)
        return model, dict(hf_models.load_tokenizer(origin)(TEXTS, padding=True, return_tensors="pt"))
    rows = [torch.tensor([ord(letter) % 96 + 1 for letter in text]) for text in TEXTS]  # tokens: letters; 0: padding
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    shape = BertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=128)
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        model, _, _ = hf_models.load_hf_model(hf_models.Origin(folder), random_weights=True, dtype=None)
    return model, {"input_ids": ids, "attention_mask": (ids > 0).long()}


def tune(model: nn.Module, batch: dict[str, Tensor], steps: int = 10) -> float:
    """Pull two passes of each sentence together and push all others apart. Return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for _ in range(steps):
        mask = batch["attention_mask"][..., None]
        views = [(model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1) for _ in range(2)]
        loss = uc.info_nce(*views, temperature=0.05)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train the encoder unchanged and with ContraNorm, and print its last block before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="NAME_OR_FOLDER", nargs="?", help="an encoder; without it, a tiny one")
    place = parser.parse_args().model
    table = Table("", "cosine of tokens", "effective rank", "loss")
    for name, scale in (("unchanged", None), ("with ContraNorm", 0.1)):
        model, batch = encoder(place)
        if scale is not None:
            print(uc.attach(model, "contra_norm", preset="bert", scale=scale))
        for when in ("before", "after"):
            torch.manual_seed(1)
            loss = f"{tune(model, batch):.3f}" if when == "after" else ""
            diagnosis = uc.diagnose(model, [batch], plan=uc.Plan(baseline=0))
            last = diagnosis.layers[-1]
            table.add_row(f"{name}, {when}", f"{last['mean_cosine']:.3f}", f"{last['effective_rank']:.2f}", loss)
    Console().print(table)
    print(diagnosis.verdict.sentence)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:  # such as a model that does not exist
        sys.exit(f"Error: {error}")
