"""The user's own data: train.tsv, dev.tsv and test.tsv in a folder."""

from pathlib import Path

import pytest
from tests.lab.tiny_text import tiny_model

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.text import glue
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.glue import recipe as recipe


def folder(root: Path, train: str, dev: str | None = None, test: str | None = None) -> Path:
    """Own data; spaces stand for tabs."""
    for name, content in (("train", train), ("dev", dev), ("test", test)):
        if content is not None:
            (root / f"{name}.tsv").write_text(content.replace(" ", "\t"), encoding="utf-8")
    return root


def test_classes_by_name(tmp_path: Path) -> None:
    root = folder(tmp_path, "id sentence label\n0 dull bad\n1 fine so-so\n2 joy 10\n3 mess bad\n",
                  "label sentence\nso-so well\n10 ten\n", "sentence\nwho?\nnobody")  # fmt: skip
    task = glue.find_task(str(root))
    assert (task.labels, task.outputs, task.scores) == (("10", "bad", "so-so"), 3, False)
    assert task.metrics == ("accuracy", "macro_f1")
    assert task.dev == ("dev",)
    train, dev, test = (glue.load_split(task, part, root) for part in ("train", "dev", "test"))
    assert (train.first, train.second, train.labels) == (["dull", "fine", "joy", "mess"], None, [1, 2, 0, 1])
    assert (dev.first, dev.labels) == (["well", "ten"], [2, 0])
    assert (test.first, test.labels) == (["who?", "nobody"], None)


def test_pairs_with_scores(tmp_path: Path) -> None:
    root = folder(tmp_path, "sentence1 score sentence2\nA -1.5e3 B\nC 7 D\n")
    task = glue.find_task(str(root))
    assert (task.outputs, task.scores, task.metrics) == (1, True, ("spearman", "pearson"))
    train = glue.load_split(task, "train", root)
    assert (train.first, train.second, train.labels) == (["A", "C"], ["B", "D"], [-1500, 7])


@pytest.mark.parametrize("score", ["nan", "-inf", "1e39", "high"])
def test_scores_are_finite(tmp_path: Path, score: str) -> None:
    root = folder(tmp_path, f"sentence score\na 1\nb {score}\n")
    with pytest.raises(UsageError, match=f"line 3.*'{score}'"):
        glue.load_split(glue.find_task(str(root)), "train", root)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("", r"train\.tsv is empty"),
        ("text label\na b\n", "line 1, should name the columns sentence, or .* it has 'text', 'label'"),
        ("sentence1 label\na b\n", "line 1, should name the columns"),
        ("sentence\na\n", "line 1, should name the columns"),
        ("sentence label score\na b 1\n", "line 1, should name the columns"),
        ("sentence sentence1 sentence2 label\na b c d\n", "line 1, should name the columns"),
        ("sentence label\na x\nb \nc \n", "line 3, has no label"),
        ("sentence label\na x\nb x\n", "only the label 'x'"),
        ("sentence label\n" + "".join(f"a {n}\n" for n in range(101)), "101 different labels, at most 100 .* score"),
    ],
)
def test_training_files_that_do_not_fit(tmp_path: Path, train: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        glue.find_task(str(folder(tmp_path, train)))


def test_a_hundred_classes_are_allowed(tmp_path: Path) -> None:
    root = folder(tmp_path, "sentence label\n" + "".join(f"a {n}\n" for n in range(100)))
    assert glue.find_task(str(root)).outputs == 100


@pytest.mark.parametrize(
    ("train", "words"),
    [("", "no examples, only the names"), ("a x\nb\nc y\n", "line 3, has 1 columns, 2 are needed")],
)
def test_rows_that_do_not_fit(tmp_path: Path, train: str, words: str) -> None:
    root = folder(tmp_path, f"sentence label\n{train}")
    with pytest.raises(UsageError, match=rf"train\.tsv.* {words}"):
        glue.load_split(glue.find_task(str(root)), "train", root)


def test_a_label_that_was_not_trained(tmp_path: Path) -> None:
    root = folder(tmp_path, "sentence label\na x\nb y\n", "sentence label\na x\nb z\n")
    with pytest.raises(UsageError, match=r"line 3.*'z'"):
        glue.load_split(glue.find_task(str(root)), "dev", root)


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'rt'.*'rte'"):
        glue.find_task("rt")
    with pytest.raises(UsageError, match=r"train\.tsv.*--task"):
        glue.find_task(str(tmp_path))
    root = folder(tmp_path, "sentence label\na x\nb y\n")
    with pytest.raises(UsageError, match=r"dev\.tsv"):
        glue.load_split(glue.find_task(str(root)), "dev", root)


@pytest.mark.parametrize("target", ["label", "score"])
def test_a_run_on_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    rows = "".join(f"{word} {n % 3}\n" for n, word in enumerate(["film", "music", "story", "actors"] * 5))
    root = folder(tmp_path, f"sentence {target}\n{rows}", f"sentence {target}\n{rows}")
    model = tiny_model(tmp_path / "model")
    config = recipe.Config(task=str(root), model=str(model), epochs=1, batch=8, cure="none", holdout=0.2, max_length=16)
    trained, record = recipe.train(config, Runtime())
    figures = ("accuracy", "macro_f1") if target == "label" else ("spearman", "pearson")
    assert record["data"]["name"] == root.name
    assert (record["data"]["metric"], record["data"]["train"], record["data"]["dev"]) == (figures[0], 16, 20)
    assert {"dev", f"dev_{figures[1]}", "validation"} <= set(record["figures"])
    assert trained.config.num_labels == (3 if target == "label" else 1)
    assert recipe.cost(config) > 0


def test_two_folders_are_two_experiments(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
        folder(root, "sentence label\na x\nb y\n")
    first, second = (recipe.Config(task=str(root)) for root in roots)
    assert identity("glue", first) != identity("glue", second)
    assert recipe.name_of(first).startswith(f"{tmp_path.name}-a-")
