"""The frozen result: JSON, table, frame."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import uncollapse as uc
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import SCHEMA, Diagnosis


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    words = [f"wörd{number}" for number in range(60)]
    data = [torch.randn(8, 60, 32)]
    return uc.diagnose(
        model, data, attention=True, labels=uc.Labels(model="[bold]tiny[/bold]", data="noise", example=words)
    )


def test_json_round_trip_is_exact(diagnosis: Diagnosis, tmp_path: Path) -> None:
    path = diagnosis.save(tmp_path / "deep" / "d.json")
    assert Diagnosis.load(path) == diagnosis
    assert Diagnosis.load(path).to_json() == diagnosis.to_json()
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert [p.name for p in path.parent.iterdir()] == ["d.json"]


def test_intervals_come_back_and_files_without_them_are_read() -> None:
    d = uc.diagnose_rows([torch.randn(40, 6)], pairs=[torch.randn(40, 6)], draws=40)
    assert Diagnosis.from_json(d.to_json()) == d
    state = json.loads(d.to_json())
    assert set(state["layers"][0]["intervals"]["alignment"]) == {"value", "low", "high", "level", "draws", "rows"}
    del state["layers"][0]["intervals"]  # as before there were any
    assert Diagnosis.from_json(json.dumps(state)).layers[0].intervals == {}


def test_a_misspelt_measure_is_an_error_and_one_that_was_not_measured_is_nan(diagnosis: Diagnosis) -> None:
    with pytest.raises(KeyError, match="'effective_rank'"):
        diagnosis.layers[0]["effectiverank"]
    with pytest.raises(KeyError, match="'erank'"):
        diagnosis.layers[0]["erank"]
    assert math.isnan(diagnosis.layers[0]["dirichlet_energy"])


def test_it_is_frozen(diagnosis: Diagnosis) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.model = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "diagnosis"),
        ("[]", "no schema"),
        ('{"schema": 99}', "schema 99, and this version of uncollapse reads 1"),
        ('{"schema": 1}', "does not fit the schema"),
        ('{"schema": 1, "surprise": 2}', "surprise"),
    ],
)
def test_other_files_are_refused_with_a_reason(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        Diagnosis.load(path)


def test_a_torn_file_is_refused(diagnosis: Diagnosis, tmp_path: Path) -> None:
    path = diagnosis.save(tmp_path / "d.json")
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ValueError, match=r"d\.json"):
        Diagnosis.load(path)


def test_print_is_a_table_with_every_layer_and_the_verdict(diagnosis: Diagnosis) -> None:
    text = str(diagnosis)
    assert "[bold]tiny[/bold] on noise" in text  # names are text, not markup
    assert all(layer.name in text for layer in diagnosis.layers)
    assert diagnosis.verdict.sentence.split(":")[0] in text
    assert max(map(len, text.splitlines())) <= 120


def test_print_fits_into_a_narrow_terminal(diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = str(diagnosis)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(diagnosis) == wide  # a file or a pipe has no width
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert max(map(len, wide.splitlines())) > 80 >= max(map(len, str(diagnosis).splitlines()))


def test_frame_has_a_row_a_layer(diagnosis: Diagnosis) -> None:
    pytest.importorskip("pandas")
    frame = diagnosis.to_frame()
    assert list(frame["layer"]) == ["embed", "block 0", "block 1"]
    assert frame["effective_rank"][1] == diagnosis.layers[1]["effective_rank"]


def test_every_measure_is_described(diagnosis: Diagnosis) -> None:
    taken = {name for layer in diagnosis.layers for name in layer.measures}
    assert taken <= set(MEASURES)
    for name in taken:
        low, high = MEASURES[name].bounds
        for layer in diagnosis.layers:
            if name in layer.measures:
                assert low is None or layer[name] >= low - 1e-6
                assert high is None or layer[name] <= high + 1e-6


def test_heat_maps_show_the_example(diagnosis: Diagnosis) -> None:
    assert len(diagnosis.example) == 48
    assert (diagnosis.example[0], diagnosis.example[-1]) == ("wörd0", "wörd59")
    for layer in diagnosis.layers:
        assert len(layer.heatmap) == 48
        assert all(row[number] == pytest.approx(1) for number, row in enumerate(layer.heatmap))


def test_facts_for_repeating_it(diagnosis: Diagnosis) -> None:
    assert diagnosis.parameters == 17088
    assert {"python", "torch", "uncollapse"} <= set(diagnosis.versions)
    assert diagnosis.settings["attention"] is True
    assert diagnosis.created
    assert diagnosis.seconds > 0


def test_no_number_is_cut_on_a_narrow_terminal() -> None:
    d = uc.diagnose_activations([torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(0))] * 2)
    for width in (60, 80, 120):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(d)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        table = text[: text.index("No collapse")]
        assert "…" not in table
        shown = [short for short in ("robust cosine", "rank share") if short.split()[0] in table]
        assert shown == ["robust cosine", "rank share"], "what the verdict rests on stays"
        assert ("for lack of width: dataset rank" in table) == (width < 100)
