"""Residuals, LayerScale, LayerNorm scaling and norms of nodes against the papers' formulas."""

import math

import pytest
import torch

import uncollapse as uc
from uncollapse.cures.layer_scale import initial_gamma

HALF = (torch.float16, torch.bfloat16)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestResidual:
    def test_formula(self):
        out, inputs = rows(5, 3), rows(5, 3, seed=1)
        expected = [[float(out[i, k]) + 0.7 * float(inputs[i, k]) for k in range(3)] for i in range(5)]
        torch.testing.assert_close(uc.residual(out, inputs, 0.7), torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(uc.Residual()(out, inputs), out + inputs)

    def test_errors_and_half(self):
        with pytest.raises(ValueError, match="same shape"):
            uc.residual(rows(5, 3), rows(5, 1))
        assert all(uc.residual(rows(2, 3).to(t), rows(2, 3).to(t), 0.5).dtype == t for t in HALF)


class TestPreActivationResidual:
    def test_formula(self):
        out, previous = rows(5, 3), rows(5, 3, seed=1)
        expected = [[float(out[i, k]) + 0.7 * float(previous[i, k]) for k in range(3)] for i in range(5)]
        found = uc.pre_activation_residual(out, previous, 0.7)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(uc.PreActivationResidual(0.7)(out, previous), found)

    def test_errors_and_half(self):
        with pytest.raises(ValueError, match="same shape"):
            uc.pre_activation_residual(rows(5, 3), rows(5, 1))
        assert all(uc.pre_activation_residual(rows(2, 3).to(t), rows(2, 3).to(t), 0.5).dtype == t for t in HALF)


class TestInitialResidual:
    def test_formula(self):
        x, first = rows(2, 4, 3), rows(2, 4, 3, seed=1)
        out = uc.initial_residual(x, first, 0.3)
        for index in [(0, 0, 0), (1, 3, 2)]:
            assert float(out[index]) == pytest.approx(0.7 * float(x[index]) + 0.3 * float(first[index]))
        torch.testing.assert_close(uc.initial_residual(x, first, 0.3, identity=1.1), 1.1 * x + 0.3 * first)

    def test_learned_weights_begin_at_the_identity(self):
        x, first = rows(4, 3), rows(4, 3, seed=1)
        layer = uc.InitialResidual(**uc.InitialResidual.PRESETS["x0"]).double()
        assert torch.equal(layer(x, first), x)
        layer(x, first).square().sum().backward()
        assert float(layer.scale_param.grad) == pytest.approx(float((2 * x * first).sum()))
        assert float(layer.identity_param.grad) == pytest.approx(float((2 * x * x).sum()))
        with torch.no_grad():
            layer.scale_param.fill_(5)
        layer.reset_parameters()
        assert torch.equal(layer(x, first), x)
        assert not list(uc.InitialResidual(0.2).parameters())

    def test_errors_and_half(self):
        with pytest.raises(ValueError, match="same shape"):
            uc.initial_residual(rows(5, 3), rows(1, 3))
        layer = uc.InitialResidual(0.5, learnable=True)
        assert all(layer(rows(2, 3).to(t), rows(2, 3).to(t)).dtype == t for t in HALF)


class TestLayerScale:
    def test_formula(self):
        x, gamma = rows(2, 4, 3), rows(3, seed=1)
        out = uc.layer_scale(x, gamma)
        assert float(out[1, 2, 0]) == pytest.approx(float(x[1, 2, 0]) * float(gamma[0]))
        torch.testing.assert_close(out, x @ torch.diag(gamma))
        assert all(uc.layer_scale(x.to(t), gamma).dtype == t for t in HALF)

    @pytest.mark.parametrize(("blocks", "start"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6), (48, 1e-6)])
    def test_start(self, blocks, start):
        assert initial_gamma(blocks) == start
        layer = uc.LayerScale(4, blocks=blocks)
        torch.testing.assert_close(layer(torch.ones(1, 4)), torch.full((1, 4), start))
        assert uc.LayerScale(4, 0.3, blocks=blocks).gamma[0].item() == pytest.approx(0.3)


class TestLayerNormScaling:
    @pytest.mark.parametrize("depth", [1, 2, 7])
    def test_formula(self, depth):
        x = rows(2, 4, 3)
        torch.testing.assert_close(uc.layer_norm_scaling(x, depth), x / math.sqrt(depth))
        torch.testing.assert_close(uc.LayerNormScaling(depth, 1.0)(x), x / depth)
        assert all(uc.layer_norm_scaling(x.to(t), depth).dtype == t for t in HALF)

    def test_depth_counts_from_one(self):
        with pytest.raises(ValueError, match="depth"):
            uc.layer_norm_scaling(rows(2, 3), 0)


class TestMeanSubtraction:
    @pytest.mark.parametrize("causal", [False, True])
    def test_formula_and_mask(self, causal):
        x, mask = rows(2, 6, 3), torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
        bad = x.masked_fill(~mask[..., None], torch.nan)
        out = uc.mean_subtraction(bad, 0.8, mask=mask, causal=causal)
        for b in range(2):
            real = x[b, mask[b]]
            for i, row in enumerate(real):
                seen = real[: i + 1] if causal else real
                expected = [float(row[k]) - 0.8 * sum(float(r[k]) for r in seen) / len(seen) for k in range(3)]
                torch.testing.assert_close(out[b, mask[b]][i], torch.tensor(expected, dtype=torch.float64))
        assert torch.isnan(out[~mask]).all()

    def test_batch_is_that_of_pyg(self):
        norm = pytest.importorskip("torch_geometric").nn.MeanSubtractionNorm()
        x, batch = rows(20, 4), torch.tensor([0, 0, 1, 2] * 5)
        torch.testing.assert_close(uc.mean_subtraction(x), norm(x))
        torch.testing.assert_close(uc.MeanSubtraction()(x, batch=batch), norm(x, batch))

    def test_degenerate(self):
        for x in (torch.zeros(5, 3), torch.ones(5, 3), torch.randn(1, 3)):
            assert torch.equal(uc.mean_subtraction(x), torch.zeros_like(x))
        assert torch.autograd.gradcheck(uc.mean_subtraction, (rows(5, 3).requires_grad_(),))
        x = torch.randn(6, 3).half()
        assert torch.equal(uc.mean_subtraction(x), uc.mean_subtraction(x.float()).half())


class TestNodeNorm:
    @pytest.mark.parametrize("p", [1, 2, 3])
    def test_formula(self, p):
        x = rows(5, 4)
        out = uc.node_norm(x, 1 / p)
        for i, row in enumerate(x.tolist()):
            mean = sum(row) / 4
            deviation = math.sqrt(1e-5 + sum((v - mean) ** 2 for v in row) / 4)
            expected = [v / deviation ** (1 / p) for v in row]
            torch.testing.assert_close(out[i], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(uc.NodeNorm(1 / p)(x), out)

    def test_degenerate(self):
        for x in (torch.zeros(5, 3), torch.ones(5, 3), torch.randn(1, 3)):
            x = x.clone().requires_grad_()
            out = uc.node_norm(x)
            out.sum().backward()
            assert torch.isfinite(out).all()
            assert torch.isfinite(x.grad).all()
        assert torch.autograd.gradcheck(uc.node_norm, (rows(5, 3).requires_grad_(),))
        assert torch.equal(uc.node_norm(rows(4, 3), 0.0), rows(4, 3))
        x = torch.randn(6, 3).half()
        assert torch.equal(uc.node_norm(x), uc.node_norm(x.float()).half())


def naive_diff_group_norm(x, assign, scale, gain, bias, eps=1e-5):
    n, d, groups = len(x), x.shape[1], len(assign)
    out = x.clone()
    shares = [[math.exp(float(x[i] @ assign[g])) for g in range(groups)] for i in range(n)]
    shares = [[s / sum(row) for s in row] for row in shares]
    for g in range(groups):
        for k in range(d):
            column = [shares[i][g] * float(x[i, k]) for i in range(n)]
            mean = sum(column) / n
            variance = sum((c - mean) ** 2 for c in column) / n
            for i in range(n):
                normal = (column[i] - mean) / math.sqrt(variance + eps)
                out[i, k] += scale * (float(gain[g, k]) * normal + float(bias[g, k]))
    return out


class TestDiffGroupNorm:
    def test_formula(self):
        x, assign, gain, bias = rows(7, 4), rows(3, 4, seed=1), rows(3, 4, seed=2), rows(3, 4, seed=3)
        out = uc.diff_group_norm(x, assign, 0.3, gain=gain, bias=bias)
        torch.testing.assert_close(out, naive_diff_group_norm(x, assign, 0.3, gain, bias))

    def test_mask_and_sets(self):
        x, mask = rows(2, 6, 4), torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
        assign = rows(3, 4, seed=1)
        out = uc.diff_group_norm(x.masked_fill(~mask[..., None], torch.nan), assign, 0.3, mask=mask)
        torch.testing.assert_close(out[mask], uc.diff_group_norm(x[mask], assign, 0.3))  # all sets are one batch
        assert torch.isnan(out[~mask]).all()

    @pytest.mark.parametrize("masked", [False, True])
    def test_layer_is_that_of_pyg(self, masked):
        theirs = pytest.importorskip("torch_geometric").nn.DiffGroupNorm(4, 3, 0.2).double()
        ours = uc.DiffGroupNorm(4, 0.2, groups=3).double()
        with torch.no_grad():
            ours.assign.copy_(theirs.lin.weight)
            for own, other in ((ours.gain, theirs.norm.weight), (ours.bias, theirs.norm.bias)):
                own.copy_(torch.randn_like(own))
                other.copy_(own.flatten())
        for seed in range(3):
            x = rows(9, 4, seed=seed)
            real = torch.arange(9) != 4 if masked else torch.ones(9, dtype=torch.bool)
            torch.testing.assert_close(ours(x, real if masked else None)[real], theirs(x[real]))
        for own, other in ((ours.mean, theirs.norm.running_mean), (ours.variance, theirs.norm.running_var)):
            torch.testing.assert_close(own.flatten(), other)
        ours.eval(), theirs.eval()
        torch.testing.assert_close(ours(x), theirs(x))

    def test_degenerate(self):
        layer = uc.DiffGroupNorm(3, 0.5, groups=2)
        for x in (torch.zeros(5, 3), torch.ones(5, 3), torch.randn(1, 3)):
            x = x.clone().requires_grad_()
            out = layer(x)
            out.sum().backward()
            assert torch.isfinite(out).all()
            assert torch.isfinite(x.grad).all()
        before = layer.mean.clone(), layer.variance.clone()
        assert torch.equal(layer(x, torch.zeros(1, dtype=torch.bool)), x)
        assert torch.equal(layer.mean, before[0])
        assert torch.equal(layer.variance, before[1])
        assert all(uc.DiffGroupNorm(3).to(t)(torch.randn(4, 3).to(t)).dtype == t for t in HALF)
        double = rows(5, 3).requires_grad_()
        assert torch.autograd.gradcheck(lambda t: uc.diff_group_norm(t, rows(2, 3, seed=1), 0.5), (double,))
        with pytest.raises(ValueError, match="groups"):
            uc.DiffGroupNorm(3, groups=0)
