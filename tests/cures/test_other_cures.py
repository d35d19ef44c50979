"""PairNorm, DropEdge, AttnScale and FeatScale against the papers' formulas."""

import pytest
import torch

from uncollapse.cures import (
    AttnScale,
    DropEdge,
    FeatScale,
    PairNorm,
    attn_scale,
    drop_edge,
    feat_scale,
    pair_norm,
)


def naive_pair_norm(x, scale, mode, eps=1e-6):
    rows = [r.tolist() for r in x]
    d = len(rows[0])
    mean = [sum(r[k] for r in rows) / len(rows) for k in range(d)]
    centred = [[r[k] - mean[k] for k in range(d)] for r in rows]
    lengths = [sum(v * v for v in r) for r in centred]
    out = []
    for i, row in enumerate(rows):
        if mode == "PN":
            out.append([scale * v / (eps + sum(lengths) / len(rows)) ** 0.5 for v in centred[i]])
        elif mode == "SI":
            out.append([scale * v / (eps + lengths[i]) ** 0.5 for v in centred[i]])
        else:
            own = (eps + sum(v * v for v in row)) ** 0.5
            out.append([scale * row[k] / own - mean[k] for k in range(d)])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["PN", "SI", "SCS"])
class TestPairNorm:
    def test_formula(self, mode):
        torch.manual_seed(0)
        x = torch.randn(9, 4, dtype=torch.float64)
        torch.testing.assert_close(pair_norm(x, 1.7, mode=mode), naive_pair_norm(x, 1.7, mode))
        torch.testing.assert_close(PairNorm(1.7, mode=mode)(x), pair_norm(x, 1.7, mode=mode))

    def test_mask_is_deletion(self, mode):
        torch.manual_seed(1)
        x = torch.randn(3, 9, 4, dtype=torch.float64)
        mask = torch.rand(3, 9) > 0.3
        bad = x.masked_fill(~mask[..., None], torch.nan)
        out = pair_norm(bad, mode=mode, mask=mask)
        for i in range(3):
            torch.testing.assert_close(out[i, mask[i]], pair_norm(x[i, mask[i]], mode=mode))
        assert torch.isnan(out[~mask]).all()

    def test_joined_graphs(self, mode):
        torch.manual_seed(2)
        x, batch = torch.randn(20, 4, dtype=torch.float64), torch.tensor([1, 0, 4, 1] * 5)
        mask = torch.rand(20) > 0.3
        out = pair_norm(x, mode=mode, batch=batch, mask=mask)
        for b in (0, 1, 4):
            part = (batch == b) & mask
            torch.testing.assert_close(out[part], pair_norm(x[part], mode=mode))

    def test_degenerate_half_and_gradient(self, mode):
        for x in (torch.zeros(5, 3), torch.ones(5, 3), torch.randn(1, 3)):
            x = x.clone().requires_grad_()
            out = pair_norm(x, mode=mode)
            out.sum().backward()
            assert torch.isfinite(out).all()
            assert torch.isfinite(x.grad).all()
        x = torch.randn(6, 3).half()
        torch.testing.assert_close(pair_norm(x, mode=mode), pair_norm(x.float(), mode=mode).half(), rtol=0, atol=0)
        double = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: pair_norm(t, mode=mode), (double,))


def test_pair_norm_keeps_the_pairwise_distance():
    torch.manual_seed(3)
    for spread in (0.1, 30.0):
        y = pair_norm(torch.randn(50, 4, dtype=torch.float64) * spread, 2.0, eps=0.0)
        torch.testing.assert_close(torch.cdist(y, y).square().mean(), torch.tensor(8.0, dtype=torch.float64))  # 2·s²
    with pytest.raises(ValueError, match="mode"):
        pair_norm(torch.randn(3, 2), mode="XX")


class TestDropEdge:
    edges = torch.tensor(
        [[0, 1, 1, 2, 2, 3, 3, 0, 4, 4, 5], [1, 0, 2, 1, 3, 2, 0, 3, 4, 5, 4]]
    )  # a square, a loop, an edge

    @pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
    def test_share(self, p):
        for seed in range(20):
            torch.manual_seed(seed)
            kept, which = drop_edge(self.edges, p)
            pairs = {tuple(e) for e in kept.T.tolist()}
            assert (4, 4) in pairs  # the loop stays
            assert all((j, i) in pairs for i, j in pairs)  # both directions go together
            assert len(pairs) == 1 + 2 * (5 - round(5 * p))
            assert torch.equal(kept, self.edges[:, which])

    def test_each_edge_has_the_same_chance(self):
        torch.manual_seed(0)
        counts = sum(drop_edge(self.edges, 0.4)[1].double() for _ in range(2000))
        plain = counts[[0, 2, 4, 6, 9]]
        assert (plain - 1200).abs().max() < 5 * (2000 * 0.6 * 0.4) ** 0.5

    def test_directed(self):
        torch.manual_seed(0)
        found = {int(drop_edge(self.edges, 0.5, undirected=False)[1].sum()) for _ in range(10)}
        assert found == {6}  # the loop and half of ten

    def test_each_graph_loses_its_share(self):
        ring = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
        both = torch.cat([ring, ring.flip(0), ring + 10, (ring + 10).flip(0)], 1)
        for seed in range(10):
            torch.manual_seed(seed)
            kept, _ = drop_edge(both, 0.3, batch=torch.arange(20) // 10)
            assert int((kept[0] < 10).sum()) == int((kept[0] >= 10).sum()) == 14

    def test_module(self):
        torch.manual_seed(0)
        layer, weight = DropEdge(0.4), torch.arange(11.0)
        kept, left = layer(self.edges, weight)
        assert kept.shape[1] == len(left) == 7
        assert torch.equal(kept, self.edges[:, left.long()])
        assert layer.eval()(self.edges)[0] is self.edges
        empty, which = drop_edge(torch.zeros(2, 0, dtype=torch.long), 0.5)
        assert empty.shape == (2, 0)
        assert which.shape == (0,)

    def test_generator_and_errors(self):
        a, b = (drop_edge(self.edges, 0.5, generator=torch.Generator().manual_seed(7))[1] for _ in range(2))
        assert torch.equal(a, b)
        with pytest.raises(ValueError, match="between"):
            drop_edge(self.edges, 1.5)
        with pytest.raises(ValueError, match="between"):
            DropEdge(-0.1)
        with pytest.raises(ValueError, match="edge_index"):
            drop_edge(self.edges.T, 0.5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attn_scale_is_the_scaled_map(masked, causal):
    torch.manual_seed(4)
    logits, v = torch.randn(2, 3, 7, 7, dtype=torch.float64), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    mask = torch.rand(2, 7) > 0.3 if masked else torch.ones(2, 7, dtype=torch.bool)
    mask[:, 0] = True
    keep = mask[:, None, None, :].expand(2, 3, 7, 7)
    if causal:
        keep = keep & torch.ones(7, 7, dtype=torch.bool).tril()
    attention = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    low = keep / keep.sum(-1, keepdim=True)  # 1/n on the keys that count
    scale = torch.tensor([0.5, 0.0, -0.3], dtype=torch.float64)
    expected = (low + (1 + scale[:, None, None]) * (attention - low)) @ v
    bad = v.masked_fill(~mask[:, None, :, None], torch.nan)
    context = attention @ v
    torch.testing.assert_close(attn_scale(context, bad, scale, mask=mask, causal=causal), expected)
    layer = AttnScale(3).double()
    torch.testing.assert_close(layer(context, bad, mask, causal=causal), context)  # λ starts at 0
    layer(context, bad, mask, causal=causal).sum().backward()
    assert torch.isfinite(layer.scale.grad).all()


def test_attn_scale_errors_and_half():
    with pytest.raises(ValueError, match="context"):
        attn_scale(torch.randn(3, 4), torch.randn(3, 4), 0.1)
    with pytest.raises(ValueError, match="keys"):
        attn_scale(torch.randn(1, 3, 4), torch.randn(1, 5, 4), 0.1, causal=True)
    x = torch.randn(1, 3, 4).bfloat16()
    assert attn_scale(x, x, 0.1).dtype == torch.bfloat16


@pytest.mark.parametrize("causal", [False, True])
def test_feat_scale(causal):
    torch.manual_seed(5)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
    low, high = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    out = feat_scale(x.masked_fill(~mask[..., None], torch.nan), low, high, mask=mask, causal=causal)
    for b in range(2):
        rows = x[b, mask[b]]
        for i, row in enumerate(rows):
            mean = rows[: i + 1].mean(0) if causal else rows.mean(0)
            torch.testing.assert_close(out[b, mask[b]][i], row + low * mean + high * (row - mean))
    assert torch.isnan(out[~mask]).all()
    layer = FeatScale(4).double()
    torch.testing.assert_close(layer(x), x)
    assert [n for n, _ in layer.named_parameters()] == ["low", "high"]
    half = torch.randn(3, 4).half()
    assert feat_scale(half, 0.1, 0.1).dtype == torch.float16
