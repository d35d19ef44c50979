"""The tokenizer of SMILES: symbols as a chemist reads them, and nothing lost."""

from pathlib import Path
from typing import Any

import pytest

from experiments import smiles

MOLECULES = {
    "CCO": "C C O",
    "ClCCBr": "Cl C C Br",
    "c1ccccc1": "c 1 c c c c c 1",
    "CC(=O)Oc1ccccc1C(=O)O": "C C ( = O ) O c 1 c c c c c 1 C ( = O ) O",
    "C[C@@H](N)C(=O)[O-]": "C [C@@H] ( N ) C ( = O ) [O-]",
    "[Na+].[Cl-]": "[Na+] . [Cl-]",
    r"F/C=C\F": "F / C = C \\ F",
    "C#N": "C # N",
    "[13CH3]O": "[13CH3] O",
    "CBr>>CI": "C Br >> C I",
    "C%12CC%12": "C %12 C C %12",
    "O=c1[nH]cnc2c1ncn2": "O = c 1 [nH] c n c 2 c 1 n c n 2",
    "BC": "B C",
    "C[Si](C)C": "C [Si] ( C ) C",
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers")
    symbols = sorted({symbol for cut in MOLECULES.values() for symbol in cut.split()} - {"[Si]"})
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *symbols]) + "\n", encoding="utf-8")
    return smiles.tokenizer(path)


@pytest.mark.parametrize("molecule", MOLECULES)
def test_symbols_are_those_of_a_chemist(words: Any, molecule: str) -> None:
    cut = [symbol for symbol, _ in words.backend_tokenizer.pre_tokenizer.pre_tokenize_str(molecule)]
    assert cut == MOLECULES[molecule].split()


@pytest.mark.parametrize("text", [*MOLECULES, "C*~$:?", "[unclosed", "C]C", "C é"])
def test_every_character_is_in_one_symbol(words: Any, text: str) -> None:
    cut = words.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "".join(symbol for symbol, _ in cut) == text
    assert [start for _, (start, _) in cut] == [0, *(end for _, (_, end) in cut[:-1])]


def test_a_saved_tokenizer_reads_the_same(words: Any, tmp_path: Path) -> None:
    from uncollapse.io.hf_models import Origin, load_tokenizer

    words.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "albert"}', encoding="utf-8")
    again = load_tokenizer(Origin(str(tmp_path)))
    for molecule, cut in MOLECULES.items():
        names = again.convert_ids_to_tokens(again(molecule)["input_ids"])
        known = [symbol if symbol != "[Si]" else "[UNK]" for symbol in cut.split()]
        assert names == ["[CLS]", *known, "[SEP]"]
