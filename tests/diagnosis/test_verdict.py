"""Calibration: what must be called collapsed, what must not, over sizes, dtypes and seeds."""

import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.diagnosis.result import Verdict
from uncollapse.registry import CURES, LOSSES

SIZES = [(b, n, d) for b in (1, 8) for n in (4, 16, 64, 197) for d in (2, 8, 16, 64, 384)]
WIDE = [(b, n, d) for b, n, d in SIZES if n >= 16 and d >= 16]


def judged(*layers: Tensor, causal: bool = False) -> Verdict:
    return uc.diagnose_activations(layers, causal=causal).verdict


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_isotropic_tokens_are_never_called_collapsed(size: tuple[int, int, int]) -> None:
    x = normal(*size, seed=sum(size))
    shifted = x + normal(size[-1], seed=1)
    for tokens in (x, shifted, x.relu(), x.bfloat16(), 1e-4 * x, 1e4 * x):
        assert judged(tokens).kind == "none"


@pytest.mark.parametrize("size", SIZES)
def test_identical_tokens_are_always_called_complete(size: tuple[int, int, int]) -> None:
    b, n, d = size
    of_sequence = normal(b, 1, d, seed=2).expand(b, n, d)
    of_all = normal(d, seed=3).expand(b, n, d)
    almost = normal(d, seed=3) + 1e-3 * normal(b, n, d, seed=4)
    for tokens in (of_sequence, of_all, almost, of_all.bfloat16(), 1e-4 * of_all):
        verdict = judged(tokens)
        assert verdict.kind in ("complete", "both")
        assert verdict.onset == "layer 0"


@pytest.mark.parametrize("size", WIDE)
def test_few_dimensions_are_called_dimensional_and_not_complete(size: tuple[int, int, int]) -> None:
    b, n, d = size
    shared = normal(b, n, 3, seed=5) @ normal(3, d, seed=6)
    of_each = normal(b, n, 3, seed=7) @ normal(b, 3, d, seed=8)
    on_axes = torch.nn.functional.pad(normal(b, n, 3, seed=9), (0, d - 3))
    noisy = shared + 0.01 * normal(b, n, d, seed=10)
    for tokens in (shared, of_each, on_axes, noisy, shared.bfloat16()):
        verdict = judged(tokens)
        assert verdict.kind == "dimensional"
        assert abs(float(uc.mean_cosine(tokens).mean())) < 0.5  # nothing to see in the similarity


@pytest.mark.parametrize("size", [s for s in WIDE if s[2] >= 64])
def test_outliers_are_recognized_and_not_called_collapse(size: tuple[int, int, int]) -> None:
    x = normal(*size, seed=11)
    constant, loud, sink = x.clone(), x.clone(), x.clone()
    constant[..., 3] += 100
    loud[..., 3] *= 100
    sink[:, 0] *= 300
    assert judged(constant).kind == judged(loud).kind == "none"
    assert any("Rogue features" in caution for caution in judged(constant).cautions)
    verdict = judged(sink, causal=True)
    assert verdict.kind == "none"
    assert any("attention sink" in caution for caution in verdict.cautions)


def spread(rank: int, seed: int) -> Tensor:
    """Tokens with mean cosine near 0 that span `rank` of 64 dimensions evenly."""
    return normal(8, 64, rank, seed=seed) @ torch.linalg.qr(normal(64, 64, seed=seed)).Q[:rank]


def test_a_rank_that_falls_while_similarity_stays() -> None:
    verdict = judged(*(spread(rank, rank) for rank in (64, 48, 40, 30, 20, 16)))
    assert verdict.kind == "dimensional"
    assert verdict.onset == "layer 4"  # 20/64 is below half of what it was, and below 0.4; 30/64 is not
    assert "(82% in an earlier layer)" in verdict.evidence[0].says


@pytest.mark.parametrize("cosine", [0.88, 0.92, 0.97])
def test_tokens_are_alike_from_a_mean_cosine_on(cosine: float) -> None:
    """The bound is 0.9: what all tokens share, and a direction of its own for each of them."""
    own = torch.linalg.qr(normal(128, 33, seed=1)).Q.T
    x = cosine**0.5 * own[:1] + (1 - cosine) ** 0.5 * own[1:]
    assert float(uc.mean_cosine(x)) == pytest.approx(cosine, abs=1e-5)
    kind = judged(normal(8, 32, 128), x.expand(8, 32, 128)).kind
    assert (kind in ("complete", "both")) == (cosine > 0.9)


def test_onset_is_where_the_last_run_begins() -> None:
    apart, alike = normal(8, 32, 48), torch.ones(8, 32, 48)
    verdict = judged(apart, alike, alike, apart, apart, alike, alike)
    assert (verdict.kind, verdict.onset) == ("complete", "layer 5")
    assert any("From layer 1 to layer 2" in caution for caution in verdict.cautions)


def test_a_collapse_that_recovers_is_told_and_not_called() -> None:
    apart, alike = normal(8, 32, 48), torch.ones(8, 32, 48)
    verdict = judged(apart, alike, alike, apart)
    assert verdict.kind == "none"
    assert any("layer 2, tokens are alike; they recover later" in caution for caution in verdict.cautions)
    flat = normal(8, 32, 2, seed=1) @ normal(2, 48, seed=2)
    verdict = judged(apart, flat, flat, apart)
    assert any("tokens span few dimensions; they recover later" in caution for caution in verdict.cautions)


def test_both() -> None:
    narrow = 20 * torch.ones(64) + normal(8, 32, 2, seed=1) @ normal(2, 64, seed=2)
    verdict = judged(normal(8, 32, 64), narrow)
    assert verdict.kind == "both"
    assert {e.measure for e in verdict.evidence} == {"robust_cosine", "rank_share"}


def test_certainty_and_its_reasons() -> None:
    assert judged(normal(64, 64, 64)).certainty == "high"
    few = judged(normal(2, 8, 64))
    assert few.certainty == "low"
    assert "16 tokens" in few.cautions[0]
    ceiling = judged(normal(16, 8, 128))
    assert ceiling.certainty == "medium"
    assert "limit the rank of the dataset to 127" in ceiling.cautions[0]
    close = judged(normal(64, 64, 64), spread(24, 3))
    assert close.certainty == "medium"
    assert "A close call" in close.cautions[0]


def test_evidence_crosses_its_bound_and_advice_is_registered() -> None:
    for tokens in (torch.ones(4, 16, 32), spread(3, 1)):
        verdict = judged(normal(4, 16, tokens.shape[-1]), tokens)
        assert verdict.collapsed
        for evidence in verdict.evidence:
            above = evidence.measure == "robust_cosine"
            assert (evidence.value >= evidence.bound) == above
        assert all(advice.cure in CURES or advice.cure in LOSSES for advice in verdict.advice)
        assert verdict.advice


def test_sets_of_one_token_are_judged_over_the_dataset() -> None:
    healthy, narrow = judged(normal(256, 1, 32)), judged(normal(256, 1, 1) @ normal(1, 32, seed=1))
    assert (healthy.kind, narrow.kind) == ("none", "dimensional")
    assert narrow.evidence[0].measure == "dataset_rank_share"
    for verdict in (healthy, narrow):
        assert verdict.certainty != "high"
        assert any("have fewer than three tokens" in caution for caution in verdict.cautions)


def test_zero_tokens_are_alike() -> None:
    assert judged(normal(8, 16, 32), torch.zeros(8, 16, 32)).kind == "complete"


def test_a_ceiling_is_named_only_where_there_is_one() -> None:
    below, above = judged(normal(8, 10, 96)).cautions[0], judged(normal(8, 16, 96)).cautions[0]
    assert "80 tokens of 96 features limit the rank of the dataset to 79" in below
    assert "Use 384 tokens or more." in below
    assert "128 tokens of 96 features are few" in above


def test_sequences_that_are_all_the_same_are_noticed() -> None:
    verdict = judged(normal(16, 128, 64), normal(1, 128, 64, seed=1).expand(16, 128, 64))
    assert verdict.certainty == "low"
    assert any("the model hardly uses them" in caution for caution in verdict.cautions)


def test_some_collapsed_sequences_among_healthy_ones_are_noticed() -> None:
    mixed = normal(4, 32, 64)
    mixed[:2] = mixed[:2, :1].expand(2, 32, 64)
    verdict = judged(normal(4, 32, 64), mixed)
    assert any("In at least a quarter of the sequences, tokens are alike" in caution for caution in verdict.cautions)


def test_a_smooth_spectrum_of_a_wide_layer_is_no_sure_collapse() -> None:
    wide = (normal(16, 256, 768) / torch.arange(1, 769)) @ torch.linalg.qr(normal(768, 768, seed=1)).Q
    verdict = judged(wide)
    assert verdict.certainty != "high"
    assert any("smooth spectra of wide layers" in caution for caution in verdict.cautions)


def test_narrow_layers_are_never_sure() -> None:
    assert judged(normal(64, 64, 8)).certainty == "medium"


def test_the_outputs_of_a_graph_network_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last convolution makes logits of collapsed nodes, which may look healthy."""
    monkeypatch.setattr("uncollapse.diagnosis.advice.find_measured", lambda *place: None)
    pyg = pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    edges = torch.randint(0, 200, (2, 1200))
    model, data = pyg.nn.GCN(16, 32, 12, 4), pyg.data.Data(torch.randn(200, 16), edges)
    verdict = uc.diagnose(model, [data]).verdict
    assert verdict.collapsed
    assert "block 11 narrows to the outputs, so the verdict is about block 10 before it." in verdict.cautions
    assert 'uc.attach(model, "contra_norm", scale=1.0, preset="gnn", layers="first 11")' in [
        tip.code for tip in verdict.advice
    ]
    verdict = uc.diagnose(pyg.nn.GCN(16, 32, 12), [data]).verdict
    assert not any("outputs" in caution for caution in verdict.cautions)


def test_a_layer_without_sets_comes_before_the_others() -> None:
    """Vectors of one token have no rank share: it must not hide what happens to the layers after them."""
    layers = [spread(rank, rank) for rank in (64, 48, 40, 30, 20, 16)]
    rogue = normal(8, 64, 64)
    rogue[..., 3] += 100
    verdict = judged(normal(512, 1, 64), rogue, *layers)
    assert verdict.kind == "dimensional"
    assert verdict.onset == "layer 6"
    assert any("Rogue features: at layer 1" in caution for caution in verdict.cautions)
