"""The configuration of Sphinx needs no network, and keeps formulas in docstrings from being read as markup."""

import io
import runpy
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

CONF = Path(__file__).parents[2] / "website" / "conf.py"
ASKED = "UNCOLLAPSE_DOCS_INTERSPHINX"


class Answer(io.BytesIO):
    status = 200


def test_no_site_is_asked_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASKED, raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("the network was used"))
    assert runpy.run_path(str(CONF))["intersphinx_mapping"] == {}


def test_only_sites_that_answer_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> Answer:
        if "pytorch.org" in url:
            return Answer()
        raise urllib.error.URLError("no network")

    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert list(runpy.run_path(str(CONF))["intersphinx_mapping"]) == ["torch"]


def test_formulas_are_escaped_and_code_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASKED, raising=False)
    escape: Any = runpy.run_path(str(CONF))["escape_formulas"]
    lines = ["mean |cos(x_i, x_j)| of `a|b` and x_ alone", ">>> a | b", "|"]
    escape(None, "function", "f", None, None, lines)
    assert lines == [r"mean \|cos(x_i, x_j)\| of `a|b` and x\_ alone", ">>> a | b", "|"]


def test_two_dashes_in_a_sentence_stay_two() -> None:
    assert "D" not in runpy.run_path(str(CONF))["smartquotes_action"].upper()
