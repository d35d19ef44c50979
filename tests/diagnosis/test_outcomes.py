"""The shipped outcomes: counted from the stored results, and how a verdict speaks of them."""

import pytest

from experiments import outcomes as counting
from uncollapse.diagnosis import reference_data
from uncollapse.diagnosis.reference_data import Outcome, embedding_outlook, outlook


def test_the_shipped_counts_are_those_of_the_stored_results() -> None:
    assert counting.TARGET.read_text(encoding="utf-8") == counting.as_json(counting.count()), (
        "run: python -m experiments.outcomes"
    )


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "graph networks": {
            "complete": Outcome(20, 3, 18, 1, 8.24),
            "none": Outcome(20, 3, 6, 7, -0.5),
            "dimensional": Outcome(4, 1, 4, 0, 9.0),
            "both": Outcome(12, 2, 12, 0, 9.0),
        },
        "embeddings": {"act": Outcome(30, 4, 25, 1, 8.0), "leave": Outcome(2, 1, 0, 2, -3.0)},
    }
    monkeypatch.setattr(reference_data, "read_outcomes", lambda: found)


def test_a_verdict_speaks_of_like_cases(counts: None) -> None:
    text = outlook("pyg", "complete")
    assert text.startswith("A cure is likely to help")
    assert "of 20 trained graph networks" in text
    assert "+8.2" in text
    assert outlook("pyg", "none").startswith("Whether a cure helps is open")
    assert "−0.5" in outlook("pyg", "none")


def test_few_cases_and_unmeasured_families_are_named_as_such(counts: None) -> None:
    assert "Too few" in outlook("pyg", "dimensional")
    assert "Too few" in outlook("pyg", "both")  # many seeds on two data sets
    assert "Too few" in outlook("huggingface", "complete")
    assert outlook("huggingface", "none") == outlook("embeddings", "complete") == ""


def test_embeddings_have_their_own_counts(counts: None) -> None:
    text = embedding_outlook(acts=True)
    assert text == (
        "of 30 such layers of 4 encoders, removing common directions raised the score of 25 and lowered that of 1 "
        "(median +8.0 points)"
    )
    assert embedding_outlook(acts=False) == ""
