"""uc.tune, with a model that needs no training."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.tuning.trial_loop import Pruned, Trial


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def dissimilarity(model: nn.Module, trial: Trial) -> float:
    """Return how different the tokens are."""
    return 1 - float(uc.mean_cosine(model.eval()(X)).mean())


def outcomes(tuned: uc.Tuned) -> list[Any]:
    return [(each.settings, each.state, each.value) for each in tuned.trials]


def test_it_finds_a_scale_and_leaves_the_model_alone(model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    seen: list[nn.Module] = []

    def train(own: nn.Module, trial: Trial) -> float:
        value = dissimilarity(own, trial)
        seen.append(own)
        assert bool(uc.attachments(own)) == (trial.number > 0)
        for parameter in own.parameters():
            nn.init.zeros_(parameter)
        return value

    found = uc.tune(model, train, scale=(0.01, 1.0), at=["block", "attention.residual"], trials=8)
    assert len({id(own) for own in seen}) == 8
    assert uc.attachments(model) == ()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert found.baseline.value == dissimilarity(model, Trial(0, {}, lambda *_: False))
    assert found.trials[1].settings == {"cure": "contra_norm", "scale": 0.1, "at": "block"}
    assert found.best.value == max(each.value or 0.0 for each in found.trials)
    eval(found.attach_line, {"uc": uc, "model": model})  # the line gives the very model that was best
    assert dissimilarity(model, Trial(0, {}, lambda *_: False)) == found.best.value
    assert str(found).startswith(f"Best: trial {found.best.number} of 8, cure=contra_norm scale=")


def test_minimize(model: nn.Module) -> None:
    found = uc.tune(model, dissimilarity, scale=[0.1, 0.5], direction="minimize", trials=3)
    assert found.best == found.baseline
    assert found.attach_line == "# no cure was better than none"
    assert str(found).startswith("No cure was better than none")
    repeats = uc.tune(model, dissimilarity, scale=[0.1, 0.5], direction="minimize", trials=6)
    assert len(repeats.trials) > 3  # of which only three differ
    assert str(repeats).startswith("No cure was better than none, over 3 trials")


def test_a_study_stays_in_its_folder_whatever_its_name(model: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "100 %20 why? #1"
    uc.tune(model, dissimilarity, trials=1, study=folder)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.db")] == [Path(folder.name, "study.db")]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_study_is_resumed(model: nn.Module, tmp_path: Path) -> None:
    whole = uc.tune(model, dissimilarity, trials=6)
    fails = [2]

    def sometimes(own: nn.Module, trial: Trial) -> float:
        if trial.number in fails:
            fails.remove(trial.number)
            raise RuntimeError("power failure")
        return dissimilarity(own, trial)

    with pytest.raises(RuntimeError, match="power failure") as caught:
        uc.tune(model, sometimes, trials=6, study=tmp_path)
    assert caught.value.__notes__[0].startswith("This was trial 2 of uc.tune: {'cure': 'contra_norm', 'scale': ")
    uc.tune(model, sometimes, trials=4, study=tmp_path)
    assert outcomes(uc.tune(model, sometimes, trials=6, study=str(tmp_path))) == outcomes(whole)
    with pytest.raises(UsageError, match="seed=0"):
        uc.tune(model, dissimilarity, trials=6, seed=1, study=tmp_path)
    with pytest.raises(UsageError, match="space differs"):
        uc.tune(model, dissimilarity, trials=6, scale=0.1, study=tmp_path)


def test_trials_that_are_worse_are_stopped(model: nn.Module) -> None:
    def train(own: nn.Module, trial: Trial) -> float:
        value = dissimilarity(own, trial)
        for epoch in range(4):
            trial.report(epoch, value)
        return value

    found = uc.tune(model, train, scale=(0.001, 1.0), trials=12)
    stopped = [each for each in found.trials if each.state == "pruned"]
    assert stopped
    assert all(each.steps < 3 and each.value is None for each in stopped)
    with pytest.raises(ValueError, match="step"):
        Trial(2, {}, lambda *_: False).report(-1, 0.0)
    with pytest.raises(Pruned, match="step 1"):
        Trial(2, {}, lambda *_: True).report(1, 0.0)


def test_cures_get_what_they_take(model: nn.Module) -> None:
    """feat_scale takes no scale; a list of numbers of blocks is one choice; None is attach's own."""
    layers = ["first 2", [0, 2], None]
    found = uc.tune(model, dissimilarity, cures=["contra_norm", "feat_scale"], layers=layers, trials=10)
    own = {each.settings["cure"]: each.settings for each in found.trials[1:]}
    assert set(own) == {"contra_norm", "feat_scale"}
    assert "scale" not in own["feat_scale"]
    assert any(each.settings.get("layers") == [0, 2] for each in found.trials)
    assert any("scale" in name for name in found.mattered)


def test_a_function_creates_the_model(model: nn.Module) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    state = torch.get_rng_state()
    twice = [outcomes(uc.tune(make, dissimilarity, trials=3, scale=[0.1, 1.0])) for _ in range(2)]
    assert twice[0] == twice[1]  # its random weights are those of the seed
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UsageError, match="got int"):
        uc.tune(lambda: 3, dissimilarity)  # type: ignore[arg-type, return-value]


def test_several_jobs(model: nn.Module) -> None:
    found = uc.tune(model, dissimilarity, trials=6, jobs=2)
    assert [each.number for each in found.trials] == list(range(6))
    assert {each.state for each in found.trials} == {"done"}


def test_metrics_that_are_not_numbers(model: nn.Module) -> None:
    found = uc.tune(model, lambda own, trial: math.nan if trial.number else 1.0, trials=3)
    assert [each.state for each in found.trials] == ["done", "failed", "failed"]
    assert found.trials[1].why == "its metric is nan"
    with pytest.raises(UsageError, match="is inf"):
        uc.tune(model, lambda own, trial: math.inf, trials=2)
    with pytest.raises(UsageError, match="train_fn"):
        uc.tune(model, lambda own, trial: None, trials=2)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cures": "contranorm"}, "Did you mean 'contra_norm'"),
        ({"cures": ()}, "cures is empty"),
        ({"at": ["block", "nowhere"]}, 'at="nowhere".*has no place'),
        ({"layers": "first 9"}, "layers"),
        ({"scale": (1.0, 0.1)}, "lower number first"),
        ({"scale": "much"}, "got 'much'"),
        ({"trials": 0}, "trials"),
        ({"direction": "up"}, "direction"),
        ({"pruner": "often"}, "hyperband"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_invalid_arguments(model: nn.Module, given: dict[str, Any], words: str) -> None:
    refuse: Callable[..., float] = pytest.fail
    with pytest.raises(UsageError, match=words):
        uc.tune(model, refuse, **given)


def test_page(model: nn.Module, tmp_path: Path) -> None:
    found = uc.tune(model, dissimilarity, scale=(0.01, 1.0), at=["block", "attention.residual"], trials=8)
    text = found.report(tmp_path / "tuned.html", title="<script>alert(1)</script>").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in text
    assert "<script>alert" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "")  # names of formats, which nothing is loaded from
    for heading in ("Best trial", "Parameter importance", "History", "Parameter by parameter", "All trials"):
        assert f">{heading}</h2>" in text
    assert text.count("<svg") >= 4
    assert "uc.attach(model, &#34;contra_norm&#34;" in text
