"""Files for the server of GLUE: names, words, order, and a line for every row."""

import dataclasses
import warnings
from pathlib import Path

import pytest

from uncollapse.lab.data.text import glue, glue_server
from uncollapse.lab.data.text.glue import TASKS, Glue

WORDS = {  # what the server wants for the classes 0, 1 (and 2)
    "cola": "0 1",
    "sst2": "0 1",
    "mrpc": "0 1",
    "qqp": "0 1",
    "wnli": "0 1",
    "rte": "entailment not_entailment",
    "qnli": "entailment not_entailment",
    "mnli": "entailment neutral contradiction",
}
FILES = "CoLA SST-2 MRPC QQP STS-B MNLI-m MNLI-mm QNLI RTE WNLI"  # without the diagnostic set, AX


def column(text: str) -> list[str]:
    header, *lines = text.splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(number) for number in range(len(lines))]
    assert text.endswith("\n")
    return [line.split("\t")[1] for line in lines]


def test_every_task_has_its_files() -> None:
    names = [name for task in TASKS.values() for name in task.answers.values()]
    assert sorted(names) == sorted(FILES.split())
    for task in TASKS.values():
        assert set(task.answers) == {part for part in task.files if part.startswith("test")}


@pytest.mark.parametrize("name", WORDS)
def test_classes_are_called_as_the_server_calls_them(name: str) -> None:
    words = WORDS[name].split()
    answers = [float(number) for number in reversed(range(len(words)))]  # `sentences.answers` gives floats or ints
    assert column(glue_server.text(TASKS[name], answers)) == words[::-1]


def test_scores_have_three_digits_and_lie_within_bounds() -> None:
    found = column(glue_server.text(TASKS["stsb"], [2.34567, -0.2, 5.7, 0.0, 4.9996, -0.0]))
    assert found == ["2.346", "0.000", "5.000", "0.000", "5.000", "0.000"]


def test_own_scores_have_any_size() -> None:
    task = dataclasses.replace(glue.TASKS["stsb"], name=glue.OWN, bounds=Glue("", "", TASKS["stsb"].columns).bounds)
    assert column(glue_server.text(task, [-1234.5678, 0.000123456])) == ["-1234.57", "0.000123456"]


def test_a_file_for_each_part(tmp_path: Path) -> None:
    answers = {"test_matched": [0, 2], "test_mismatched": [1]}
    files = glue_server.write_all(tmp_path, TASKS["mnli"], answers)
    assert files == [tmp_path / "predictions" / "MNLI-m.tsv", tmp_path / "predictions" / "MNLI-mm.tsv"]
    assert files[0].read_text() == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert column(files[1].read_text()) == ["neutral"]


def written(root: Path, task: Glue, name: str, *rows: str) -> Path:
    (root / task.folder).mkdir(parents=True, exist_ok=True)
    (root / task.folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


def test_every_row_of_a_test_file_counts(tmp_path: Path) -> None:
    """A damaged row that were left out would give all rows behind it the answer of another."""
    task = TASKS["qqp"]
    rows = ["id\tquestion1\tquestion2", "0\twhy?\twho?", "1\tonly one", "2\t\thow?", "3", "4\twhat?\twhere?"]
    written(tmp_path, task, "test.tsv", *rows)
    found = glue_server.parts_of(task, tmp_path)["test"]
    assert list(found.first) == ["why?", "only one", "", "", "what?"]
    assert list(found.second or ()) == ["who?", "", "how?", "", "where?"]
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    written(tmp_path, task, "train.tsv", head, "0\t1\t2\twhy?\twho?\t0", "1\t3\t4\tonly one", "2\t5\t6\ta?\tb?\t1")
    train = glue.load(task, "train", tmp_path)  # there such rows go
    assert (list(train.first), train.skipped) == (["why?", "a?"], 1)


def test_labels_of_a_test_file_are_no_trouble(tmp_path: Path) -> None:
    """MRPC's own files have them; the predictions are the model's all the same."""
    task = TASKS["mrpc"]
    written(tmp_path, task, "test.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\tone\ttwo")
    assert list(glue_server.parts_of(task, tmp_path)["test"].first) == ["one"]


def test_a_missing_test_file_is_told_and_is_no_error(tmp_path: Path) -> None:
    task = TASKS["sst2"]
    written(tmp_path, task, "test-labeled.tsv", "sentence\tlabel", "fine\t1")  # not the server's rows
    with pytest.warns(UserWarning, match=r"There will be no predictions for SST-2\. There is no test\.tsv of sst2 in"):
        assert glue_server.parts_of(task, tmp_path) == {}


def test_one_part_may_be_missing(tmp_path: Path) -> None:
    task = TASKS["mnli"]
    written(tmp_path, task, "test_mismatched.tsv", "index\tsentence1\tsentence2", "0\ta man\ta person")
    with pytest.warns(UserWarning, match=r"no predictions for MNLI-m\. There is no test_matched\.tsv") as told:
        found = glue_server.parts_of(task, tmp_path)
    assert (list(found), len(told)) == (["test_mismatched"], 1)
    written(tmp_path, task, "test_matched.tsv", "index\tsentence1\tsentence2", "0\ta dog\ta cat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(glue_server.parts_of(task, tmp_path)) == ["test_matched", "test_mismatched"]
