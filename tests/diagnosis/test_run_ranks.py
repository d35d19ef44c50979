"""A diagnosis whose batches several processes share is that of one."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import uncollapse as uc
from uncollapse import distributed as ranks
from uncollapse.diagnosis.result import Diagnosis

if __name__ != "__main__":
    from tests.distributed import finish, start

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

SAMPLED = ("effective_rank", "token_variance", "feature_variance", "robust_cosine", "rank_share")  # of some sequences
EXACT = ("mean_cosine", "dataset_rank", "feature_correlation", "outlier_share", "pooled_cosine", "alignment")


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def batches(seed: int = 1) -> list[torch.Tensor]:
    """Seven of different sizes, so that the processes have different numbers of them."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 10, 16, generator=source) for size in (9, 4, 8, 6, 3, 8, 5)]


def measured(gather: bool) -> Diagnosis:
    return uc.diagnose(model(), batches(), pairs=batches(2), labels=uc.Labels("tiny"), gather=gather)


def few(gather: bool) -> Diagnosis:
    """One batch, which only the first process has."""
    return uc.diagnose(model(), batches()[:1], labels=uc.Labels("tiny"), gather=gather, plan=uc.Plan(baseline=3))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks.join_group("cpu")
    found = {"all": measured(gather=True), "few": few(gather=True), "each": measured(gather=False)}
    found["thrice"] = uc.diagnose(model(), batches(), plan=uc.Plan(baseline=5), gather=True)
    told = {}
    for name, wrong in (
        ("sharded", lambda: uc.diagnose(fully_shard(model()), batches(), gather=True)),
        ("none", lambda: uc.diagnose(model(), [], gather=True)),
    ):
        try:
            wrong()
        except (ValueError, ranks.PeerError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    rank = ranks.rank()
    for name, diagnosis in found.items():
        (folder / f"{name}-{rank}.json").write_text(diagnosis.to_json())
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    ranks.leave_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three processes found."""
    folder = tmp_path_factory.mktemp("diagnoses")
    started, _store = start(3, __file__, str(folder))
    for code, _, problems in finish(started):
        assert code == 0, problems
    return folder


def read(path: Path) -> Diagnosis:
    return Diagnosis.load(path)


def test_processes_that_share_the_batches_measure_what_one_does(folder: Path) -> None:
    alone, shared = measured(gather=False), read(folder / "all-0.json")
    assert (shared.batches, shared.sequences, shared.tokens) == (7, 43, 430)
    assert [layer.name for layer in shared.layers] == [layer.name for layer in alone.layers]
    for one, several in zip(alone.layers, shared.layers, strict=True):
        assert one.measures.keys() == several.measures.keys()
        for name in EXACT:
            assert several[name] == pytest.approx(one[name], abs=1e-6), (one.name, name)
        for name in SAMPLED:
            assert several[name] == pytest.approx(one[name], rel=0.2, abs=0.1), (one.name, name)
        assert several.heatmap == one.heatmap
        assert several.spectrum == pytest.approx(one.spectrum, abs=1e-6)
    assert shared.verdict.kind == alone.verdict.kind
    assert [layer.measures for layer in shared.baseline] == [layer.measures for layer in alone.baseline]


def test_how_much_the_random_copy_saw(folder: Path) -> None:
    """It is the first process's, which has some of the batches."""
    assert [read(folder / f"{name}-0.json").settings["baseline_batches"] for name in ("all", "few", "thrice")] == [
        1,
        1,
        3,
    ]


def test_all_processes_learn_the_diagnosis(folder: Path) -> None:
    for name in ("all", "few"):
        told = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(3)]
        assert told[0] == told[1] == told[2]


def test_a_process_without_a_batch(folder: Path) -> None:
    alone, shared = few(gather=False), read(folder / "few-2.json")
    assert [layer.measures for layer in shared.layers] == [layer.measures for layer in alone.layers]


def test_without_gather_each_process_measures_all(folder: Path) -> None:
    alone = measured(gather=False)
    for rank in range(3):
        found = read(folder / f"each-{rank}.json")
        assert [layer.measures for layer in found.layers] == [layer.measures for layer in alone.layers]


def test_what_cannot_be_shared_is_an_error_in_all(folder: Path) -> None:
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(3)]
    assert all("weights" in each["sharded"] for each in told)
    assert told[0]["none"].startswith("ValueError: No layer of TransformerEncoder was measured in 0 batches")
    assert told[1]["none"].startswith("PeerError: The diagnosis failed in the first process: ValueError: No layer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo may still run, and an interpreter that ends under them aborts
