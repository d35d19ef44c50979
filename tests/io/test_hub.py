"""What the hub answers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from uncollapse.errors import UsageError
from uncollapse.io import hf_models

huggingface_hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def model_info(self: Any, repo: str, timeout: float) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_what_is_there_and_what_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, None)
    assert hf_models.is_on_hub("owner/model")
    answer(monkeypatch, ConnectionError())
    assert not hf_models.is_on_hub("owner/model")


def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    response: Any = SimpleNamespace(headers={}, request=None)
    for kind, words in {errors.RepositoryNotFoundError: "nor a public model", errors.GatedRepoError: "log in"}.items():
        answer(monkeypatch, kind("no", response=response))
        with pytest.raises(UsageError, match=words):
            hf_models.is_on_hub("owner/model")


@pytest.mark.parametrize("name", ["./folder", "a/b/c", "/absolute", "~/home", "with space"])
def test_a_path_is_no_name(name: str) -> None:
    with pytest.raises(UsageError, match=r"no folder.*; name a folder"):
        hf_models.is_on_hub(name)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"uncollapse\[hf\]"):
        hf_models.is_on_hub("owner/model")


def test_the_remedy_of_a_library_is_shown() -> None:
    error = ValueError("This needs sentencepiece. Install it with pip.")
    assert hf_models._describe(error) == "This needs sentencepiece. Install it with pip."
    assert len(hf_models._describe(ValueError("x" * 5000))) < 700
