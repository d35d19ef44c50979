"""The accelerator of a run: launchers that are rejected."""

import pytest
from torch import nn

from uncollapse.errors import UsageError
from uncollapse.lab.engine.step import build_accelerator

pytest.importorskip("accelerate")


def test_a_launcher_that_splits_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # what `accelerate launch --use_fsdp` says
    with pytest.raises(UsageError, match="FSDP"):
        build_accelerator(nn.Linear(2, 2), None, "no")
