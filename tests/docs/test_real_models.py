"""The docs' page of real models is made from results that can be read, and says what they say."""

from pathlib import Path

import pytest
from website.pages import real_models

from uncollapse import Diagnosis
from uncollapse.diagnosis import reference_data

RESULTS = Path(__file__).parents[2] / "results" / "real_models"
FILES = sorted(path for path in RESULTS.glob("*.json") if path.stem != "false_alarms")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_diagnoses_can_be_read_and_name_no_machine(path: Path) -> None:
    d = Diagnosis.load(path)
    assert d.created
    assert d.versions["torch"]
    text = path.read_text(encoding="utf-8")
    assert str(Path.home()) not in text
    assert "site-packages" not in text


@pytest.mark.parametrize(
    "name",
    ["minilm", "minilm_stsb", "albert", "smollm2", "gcn2_none", "vit_contra_trained", "tiny_vit", "whisper"],
)
def test_healthy_models_were_not_called_collapsed(name: str) -> None:
    diagnosis = Diagnosis.load(RESULTS / f"{name}.json")
    assert {part.verdict.kind for part in (diagnosis, *diagnosis.others)} == {"none"}


def test_the_decoder_has_outliers_that_are_recognized() -> None:
    verdict = Diagnosis.load(RESULTS / "smollm2.json").verdict
    assert any("attention sink" in caution for caution in verdict.cautions)


def test_the_shipped_curves_of_healthy_models_are_those_of_the_results() -> None:
    text = Path(reference_data.__file__).with_name(reference_data.HEALTHY_FILE).read_text(encoding="utf-8")
    assert text == real_models.healthy_curves()
    for names in real_models.HEALTHY.values():
        for name in names:
            assert Diagnosis.load(RESULTS / f"{name}.json").verdict.kind == "none"
