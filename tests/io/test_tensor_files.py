"""Weights of files."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io.tensor_files import load_into


class Run:
    """Runs if it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("the pickle was run",))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("wrapping", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_every_wrapping_is_unwrapped(tmp_path: Path, wrapping: str | None, prefix: str) -> None:
    saved, target = model(), model()
    weights = {prefix + key: value for key, value in saved.state_dict().items()}
    torch.save({wrapping: weights, "epoch": 4} if wrapping else weights, tmp_path / "weights.pt")
    load_into(target, tmp_path / "weights.pt")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), target.parameters(), strict=True))


def test_a_model_that_has_the_prefix_keeps_it(tmp_path: Path) -> None:
    saved, target = nn.ModuleDict({"model": model()}), nn.ModuleDict({"model": model()})
    save_file(saved.state_dict(), tmp_path / "weights.safetensors")
    load_into(target, tmp_path / "weights.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), target.parameters(), strict=True))


def test_weights_without_a_place(tmp_path: Path) -> None:
    weights = model().state_dict()
    torch.save({"0.weight": weights["0.weight"], "head": torch.ones(2)}, tmp_path / "part.pt")
    with pytest.raises(UsageError, match=r"0\.bias.*head"):
        load_into(model(), tmp_path / "part.pt")
    torch.save({**weights, "1.bias": torch.ones(7)}, tmp_path / "size.pt")
    with pytest.raises(UsageError, match=r"1\.bias"):
        load_into(model(), tmp_path / "size.pt")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Run(), protocol=2))
    torch.save({"state_dict": Run()}, tmp_path / "code2.pt")
    (tmp_path / "text.pt").write_text("no weights", encoding="utf-8")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.safetensors").write_text("no weights", encoding="utf-8")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    for path in tmp_path.iterdir():
        with pytest.raises(UsageError, match=path.name):
            load_into(model(), path)
