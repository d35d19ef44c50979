"""The numbers of ContraNorm's paper (arXiv 2303.06562) on GLUE's development sets."""

from uncollapse.lab.tables.paper_table import Published

GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte")
TABLE_1 = """
none 55.28 92.89 88.96 88.24 88.61 84.65 91.51 68.59
uniform_loss 58.08 93.00 89.46 88.14 88.69 84.45 91.60 68.59
contra_norm 58.83 93.12 89.49 88.30 88.66 84.87 91.78 70.76
contra_norm_before_residual 59.57 93.12 89.97 88.30 88.93 84.84 91.58 68.95
contra_norm_best_place 59.57 93.23 89.97 88.30 88.93 84.87 91.78 70.76
contra_norm_both_terms 58.80 93.12 89.60 88.35 88.97 84.81 91.47 68.23
contra_norm_l2 59.82 93.00 89.64 88.37 88.92 84.72 91.58 68.95
contra_norm_v2 62.08 93.69 91.78 88.36 89.59 85.24 91.95 70.04
"""
TABLE_ALBERT = """
none 57.35 93.69 92.09 87.23 90.54 84.56 90.90 76.53
contra_norm 58.51 92.89 92.86 87.45 90.56 84.33 91.76 79.06
contra_norm_best_place 58.76 93.23 92.89 87.67 90.72 84.69 92.28 79.06
"""
MISMATCHED = """
none 84.61
uniform_loss 84.43
contra_norm 84.66
contra_norm_before_residual 84.67
contra_norm_best_place 84.67
contra_norm_both_terms 84.67
contra_norm_l2 84.58
contra_norm_v2 85.19
"""
MISMATCHED_ALBERT = """
none 84.37
contra_norm 84.62
contra_norm_best_place 84.95
"""


def published(text: str, model: str, rows: str) -> tuple[Published, ...]:
    """The numbers of a table, for a model; rows: what a board calls its rows. One column alone is MNLI's."""
    found = []
    for line in text.strip().splitlines():
        name, *numbers = line.split()
        words = name.replace("_", " ").replace("contra norm", "contra_norm").replace("uniform loss", "uniform_loss")
        for task, number in zip(GLUE if len(numbers) > 1 else ("mnli",), numbers, strict=True):
            cell = {"model": model, rows: words, "task": task}
            found.append(Published(cell, float(number), None, "ContraNorm, Table 1"))
    return tuple(found)
