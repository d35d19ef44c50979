"""GLUE's tasks from tiny files in their own formats."""

import os
from pathlib import Path

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.glue import TASKS

FOLDER = os.environ.get("UNCOLLAPSE_DATA")
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
# task, part, file, its content, sentences, labels
FILES = [
    ("cola", "train", "CoLA/train.tsv", "gj04\t1\t\tOne sank.\ngj04\t0\t*\tSank one.\n",
     ["One sank.", "Sank one."], [1, 0]),
    ("cola", "dev", "CoLA/dev.tsv", "gj04\t0\t*\tSank.", ["Sank."], [0]),
    ("cola", "test", "CoLA/test.tsv", "index\tsentence\n0\tBill ate.\n", ["Bill ate."], None),
    ("sst2", "train", "SST-2/train.tsv", "sentence\tlabel\ndull \t0\na joy \t1\n", ["dull", "a joy"], [0, 1]),
    ("sst2", "dev", "SST-2/dev.tsv", "sentence\tlabel\na joy\t1\n", ["a joy"], [1]),
    ("sst2", "test", "SST-2/test.tsv", "index\tsentence\n0\ta joy\n", ["a joy"], None),
    ("mrpc", "train", "MRPC/train.tsv", f"\ufeff{MRPC}\r\n1\t7\t8\tHe said so.\tSo he said.\r\n",
     [("He said so.", "So he said.")], [1]),
    ("mrpc", "dev", "MRPC/dev.tsv", f"{MRPC}\n0\t7\t8\tA\tB\n", [("A", "B")], [0]),
    ("mrpc", "test", "MRPC/test.tsv", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tA\tB\n", [("A", "B")], None),
    ("qqp", "train", "QQP/train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t1\t2\tWhy?\tHow?\t1\n",
     [("Why?", "How?")], [1]),
    ("qqp", "test", "QQP/test.tsv", "id\tquestion1\tquestion2\n0\tWhy?\tHow?\n", [("Why?", "How?")], None),
    ("stsb", "train", "STS-B/train.tsv", f"{STSB}\tscore\n0\ta\tb\t1\t2\tc\td\tOne.\tTwo.\t3.800\n",
     [("One.", "Two.")], [3.8]),
    ("stsb", "test", "STS-B/test.tsv", f"{STSB}\n0\ta\tb\t1\t2\tc\td\tOne.\tTwo.\n", [("One.", "Two.")], None),
    ("stsb", "dev", "STS-B/sts-dev.csv",
     "g\tf\t12\t1\t5.000\tA\tB\ng\tf\t12\t2\t0\tC\tD\tlicence\ng\tf\t12\t3\t2.5\tE\tF\tsource\tsource\n",
     [("A", "B"), ("C", "D"), ("E", "F")], [5, 0, 2.5]),
    ("mnli", "train", "MNLI/train.tsv", f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label\n"
     "0\t1\t1n\tfiction\t-\t-\t-\t-\tP\tH\tentailment\tcontradiction\n", [("P", "H")], [2]),
    ("mnli", "dev_matched", "MNLI/dev_matched.tsv", f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
     "0\t1\t1n\tfiction\t-\t-\t-\t-\tP\tH\tneutral\tneutral\tneutral\n", [("P", "H")], [1]),
    ("mnli", "dev_mismatched", "MNLI/dev_mismatched.tsv", "sentence1\tsentence2\tgold_label\nP\tH\tentailment\n",
     [("P", "H")], [0]),
    ("mnli", "test_matched", "MNLI/test_matched.tsv", "index\tsentence1\tsentence2\n0\tP\tH\n", [("P", "H")], None),
    ("mnli", "test_mismatched", "MNLI/test_mismatched.tsv", "index\tsentence1\tsentence2\n0\tQ\tH\n",
     [("Q", "H")], None),
    ("qnli", "dev", "QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n",
     [("Who?", "He.")], [0]),
    ("rte", "train", "RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n",
     [("A.", "B.")], [1]),
    ("rte", "test", "RTE/test.tsv", "index\tsentence1\tsentence2\n0\tA.\tB.\n", [("A.", "B.")], None),
    ("wnli", "dev", "WNLI/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", [("A.", "B.")], [1]),
]  # fmt: skip


def put(path: Path, content: str) -> Path:
    """A file as it is, without translated line ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return path


def sst2(root: Path, content: str) -> glue.Examples:
    """The training part of SST-2 from this content."""
    put(root / "SST-2/train.tsv", content)
    return glue.load_split(TASKS["sst2"], "train", root)


@pytest.mark.parametrize("below", ["", "glue"])
@pytest.mark.parametrize(("task", "part", "file", "content", "sentences", "labels"), FILES)
def test_a_part_of_a_task(
    tmp_path: Path, below: str, task: str, part: str, file: str, content: str,
    sentences: list[str] | list[tuple[str, str]], labels: list[float] | None,
) -> None:  # fmt: skip
    put(tmp_path / below / file, content)
    found = glue.load_split(TASKS[task], part, tmp_path)
    texts = list(found.first) if found.second is None else list(zip(found.first, found.second, strict=True))
    assert (texts, found.labels, found.skipped) == (sentences, labels, 0)


def test_every_task_is_read_above() -> None:
    assert {task for task, *_ in FILES} == set(TASKS)


@pytest.mark.parametrize(
    "sentence",
    ['"quoted', 'a "word" in it', "two\u2028lines", "form\x0cfeed", "next\x85line", "a lone\rreturn", "ß 北 🎬"],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_tabs_and_line_ends_part(tmp_path: Path, sentence: str, end: str) -> None:
    found = sst2(tmp_path, end.join(["sentence\tlabel", f"{sentence}\t1", "plain\t0"]))
    assert (list(found.first), found.labels) == ([sentence, "plain"], [1, 0])


def test_chosen_examples(tmp_path: Path) -> None:
    found = sst2(tmp_path, "sentence\tlabel\na\t0\nb\t1\nc\t1\n").select([2, 0])
    assert (found.first, found.second, found.labels, len(found)) == (["c", "a"], None, [1, 0], 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", r"train\.tsv is empty"),
        ("\r\n\n", r"train\.tsv is empty"),
        ("sentence\tlabel\n", "no examples, only the names of its columns"),
        ("text\tlabel\na\t1\n", r"line 1, should name the columns 'sentence' of sst2, .* it has 'text', 'label'"),
        ("a joy\t1\n", "line 1, should name the columns 'sentence', 'label' of sst2"),
        ("sentence,label\na,1\n", "with tabs between them; it has 'sentence,label'"),
        ("sentence\tlabel\tlabel\na\t1\t0\n", "line 1, should name once only the columns 'label'"),
        ("sentence\tlabel\na\t1\nonly this\n", r"line 3, has 1 columns, 2 are needed: 'only this'"),
        ("sentence\tlabel\na\t1\n\nb\t1\n", "line 3, has 1 columns"),
        ("sentence\tlabel\n \t1\n", "line 2, has an empty sentence"),
        ("sentence\tlabel\na\t1\nb\tgood\n", "line 3: the label must be one of 0, 1, got 'good'"),
        ("sentence\tlabel\na\t1.0\n", "line 2: the label must be one of 0, 1, got '1.0'"),
        ("sentence\tlabel\na\t\n", "line 2: the label must be one of 0, 1, got ''"),
        ("sentence\tlabel\n" + "a" * 200 + "\n", "line 2, .*a…'"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"train\.tsv.*{words}" if "train" not in words else words):
        sst2(tmp_path, content)


@pytest.mark.parametrize("score", ["5.001", "-0.1", "nan", "inf", "four", ""])
def test_scores_of_sts_b(tmp_path: Path, score: str) -> None:
    put(tmp_path / "STS-B/sts-train.csv", f"g\tf\t1\t1\t5\tA\tB\ng\tf\t1\t2\t{score}\tA\tB\n")
    with pytest.raises(UsageError, match=f"line 2.*'{score}'"):
        glue.load_split(TASKS["stsb"], "train", tmp_path)


def test_rows_of_qqp_that_lack_columns(tmp_path: Path) -> None:
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    put(tmp_path / "QQP/train.tsv", f"{head}1\t1\t2\tA?\n2\t1\t2\tA?\tB?\t1\n3\t1\t2\tC?\t\t0\n")
    found = glue.load_split(TASKS["qqp"], "train", tmp_path)
    assert (found.first, found.second, found.labels, found.skipped) == (["A?", "C?"], ["B?", ""], [1, 0], 1)
    put(tmp_path / "QQP/dev.tsv", f"{head}1\t1\t2\tA?\n")
    with pytest.raises(UsageError, match=r"dev\.tsv.*damaged"):
        glue.load_split(TASKS["qqp"], "dev", tmp_path)


def test_test_parts_keep_labels_that_are_there(tmp_path: Path) -> None:
    put(tmp_path / "MRPC/test.tsv", f"{MRPC}\n1\t7\t8\tA\tB\n")
    assert glue.load_split(TASKS["mrpc"], "test", tmp_path).labels == [1]


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    put(tmp_path / "SST-2/train.tsv", "").write_bytes("sentence\tlabel\ncafé\t1\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"UTF-8.*byte 18"):
        glue.load_split(TASKS["sst2"], "train", tmp_path)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*--data-root"):
        glue.load_split(TASKS["rte"], "train", tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"train\.tsv.*--data-root"):
        glue.load_split(TASKS["rte"], "train", tmp_path)
    with pytest.raises(UsageError, match=r"sts-train\.csv"):
        glue.load_split(TASKS["stsb"], "train", tmp_path)
    with pytest.raises(UsageError, match=r"'dev'.*'dev_matched'"):
        glue.load_split(TASKS["mnli"], "dev", tmp_path)


@pytest.mark.skipif(FOLDER is None, reason="UNCOLLAPSE_DATA names the folder that has the data sets")
@pytest.mark.parametrize(
    ("task", "sizes"),
    [("cola", (8551, 1043, 1063)), ("rte", (2490, 277, 3000)), ("stsb", (5749, 1500, 1379)), ("wnli", (635, 71, 146))],
)
def test_the_real_files(task: str, sizes: tuple[int, ...]) -> None:
    assert FOLDER is not None
    parts = [glue.load_split(TASKS[task], part, Path(FOLDER)) for part in ("train", "dev", "test")]
    assert tuple(map(len, parts)) == sizes
    assert all(part.skipped == 0 for part in parts)
