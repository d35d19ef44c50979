"""Names, facts and the errors for unknown names."""

import sys

import pytest
import torch

import uncollapse as uc
from uncollapse.registry import CURES, LOSSES, METRICS, Registry, discover


def test_unknown_name_lists_the_choices():
    with pytest.raises(KeyError, match=r"'contra_norm'.*pair_norm"):
        CURES["contranorm"]
    with pytest.raises(KeyError, match=r"metric.*'xyzzy'"):
        METRICS["xyzzy"]


def test_a_name_is_given_once():
    registry: Registry[int] = Registry("thing")
    registry.add("a", 1)
    with pytest.raises(ValueError, match="registered already"):
        registry.add("a", 2)


@pytest.mark.parametrize("registry", [METRICS, CURES, LOSSES], ids=["metrics", "cures", "losses"])
def test_every_entry_is_public(registry):
    for name, entry in registry.items():
        assert getattr(uc, name) is entry.function


def test_a_file_in_the_folder_is_enough(tmp_path, monkeypatch):
    (tmp_path / "length.py").write_text(
        "from uncollapse.registry import metric\n"
        "@metric(better=None, paper='none')\n"
        "def mean_length(x):\n    return x.norm(dim=-1).mean()\n"
    )
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))
    monkeypatch.setattr(uc.metrics, "__path__", [str(tmp_path)])
    discover("uncollapse.metrics", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "uncollapse.metrics.length")
    assert float(uc.mean_length(torch.ones(2, 4))) == 2
    with pytest.raises(AttributeError, match="'mean_width'"):
        _ = uc.mean_width
