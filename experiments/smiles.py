"""SMILES, the notation of molecules as text (https://opensmiles.org), cut into its symbols."""

from pathlib import Path
from typing import Any

from uncollapse.errors import import_optional
from uncollapse.io.loading import silence_libraries

SYMBOL = "|".join(
    (
        r"\[[^\[\]]*\]",  # an atom in brackets, with its isotope, chirality, hydrogens and charge
        "Br|Cl",  # the elements of two letters that need no brackets
        "[A-Za-z]",  # those of one; small letters are aromatic
        r"%\d\d|\d",  # where a ring is closed
        ">>",  # between the sides of a reaction
        r".",  # bonds, branches, and whatever else: nothing is lost
    )
)
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
SPECIAL |= {"mask_token": "[MASK]"}


def tokenizer(vocabulary: Path, max_length: int = 512) -> Any:
    """A fast tokenizer of transformers for SMILES.

    Args:
        vocabulary: a file with one symbol a line, the first one is number 0; it has the special ones of BERT.
        max_length: tokens that its model can read.
    """
    with silence_libraries():
        transformers: Any = import_optional("transformers", "hf")
    parts: Any = import_optional("tokenizers", "hf")
    numbers = {word: number for number, word in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    made = parts.Tokenizer(parts.models.WordLevel(numbers, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = parts.pre_tokenizers.Split(parts.Regex(SYMBOL), behavior="isolated")
    ends = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = parts.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=max_length, **SPECIAL)
