"""The user's own sentences as a task: what `train.tsv` has tells what is to be learnt."""

from pathlib import Path

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.glue_files import Row, path_of, rows
from uncollapse.lab.data.text.glue_tasks import OWN, PAIR, PLAIN, SINGLE, Columns, Glue

MOST = 100  # classes: more of them are numbers, or texts, that went into the wrong column
ANSWERS = {"test": OWN}


def own(root: Path) -> Glue:
    """The task in `train.tsv`, `dev.tsv` and, without labels, `test.tsv` of a folder.

    The first line of each names its columns: `sentence`, or `sentence1` and `sentence2`, and `label` for classes or
    `score` for numbers. Other columns are not read. The classes are those of the training file, in sorted order.
    """
    path = path_of(Glue(OWN, str(root), Columns(SINGLE), files=PLAIN), "train", root)
    (_, names), *lines = rows(path)
    names = [name.strip() for name in names]
    sentences = [columns for columns in (SINGLE, PAIR) if set(columns) <= set(names)]
    targets = [name for name in ("label", "score") if name in names]
    if len(sentences) != 1 or len(targets) != 1:
        raise UsageError(
            f"{path}, line 1, should name the columns sentence, or sentence1 and sentence2, and label (classes) or "
            f"score (numbers), with tabs between them; it has {', '.join(map(repr, names[:12]))}."
        )
    columns = Columns(sentences[0], targets[0])
    if targets == ["score"]:
        return Glue(OWN, str(root), columns, (), ("spearman", "pearson"), PLAIN, answers=ANSWERS)
    labels = _classes(path, names.index("label"), lines)
    return Glue(OWN, str(root), columns, labels, ("accuracy", "macro_f1"), PLAIN, answers=ANSWERS)


def _classes(path: Path, column: int, lines: list[Row]) -> tuple[str, ...]:
    words = {row[column].strip(): number for number, row in reversed(lines) if len(row) > column}
    if "" in words:
        raise UsageError(f"{path}, line {words['']}, has no label; give it one or take the line out.")
    if len(words) > MOST:
        raise UsageError(
            f"{path} has {len(words)} different labels, at most {MOST} classes are learnt; name the column score if "
            "they are numbers."
        )
    if lines and len(words) < 2:
        raise UsageError(f"{path} has only the label {', '.join(map(repr, words))}; two classes or more can be learnt.")
    return tuple(sorted(words)) or ("",)  # without any line the reader says so
