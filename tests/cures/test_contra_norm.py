"""ContraNorm against each published variant, written from the paper with all pairs in a matrix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from uncollapse.cures import ContraNorm, contra_norm
from uncollapse.pairwise import grid


def unit(x):
    return F.normalize(x, dim=-1)


def bert(x, s, tau=1.0):
    sim = (unit(x) @ unit(x).mT / tau).softmax(-1)
    return (1 + s) * x - s * sim @ x


def bert_v2(x, s, tau=1.0):
    weight = (unit(x).mT @ unit(x) / tau).softmax(-1)
    return (1 + s) * x - s * x @ weight


def albert(x, s, tau=1.0):
    return x - s * (unit(x) @ unit(x).mT / tau).softmax(-1) @ x


def vit(x, s, tau=1.0):
    return F.layer_norm(albert(x, s, tau), x.shape[-1:], eps=1e-6)


def gnn(x, s, tau=1.0, edge_index=None):
    n = x.shape[0]
    adjacent = torch.eye(n, dtype=torch.bool)
    adjacent[edge_index[0], edge_index[1]] = True
    adjacent[edge_index[1], edge_index[0]] = True
    logits = (unit(x) @ unit(x).mT / tau).masked_fill(adjacent, -torch.inf)
    some = ~adjacent.all(-1, keepdim=True)  # the published code gives NaN for a node adjacent to all others
    weight = logits.masked_fill(~some, 0).softmax(-1) * some
    return (1 + s) * x - s * weight @ x


REFERENCES = {"bert": bert, "bert_v2": bert_v2, "albert": albert, "vit": vit, "gnn": gnn, "arxiv": bert_v2}


@pytest.mark.parametrize("name", ContraNorm.PRESETS)
@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_presets_are_the_published_variants(name, tau):
    torch.manual_seed(0)
    x = torch.randn(50, 12, dtype=torch.float64)
    edges = {"edge_index": torch.randint(0, 50, (2, 120))} if name == "gnn" else {}
    layer = ContraNorm.preset(name, 12, 0.3, temperature=tau).double()
    torch.testing.assert_close(layer(x, **edges), REFERENCES[name](x, 0.3, tau, **edges))


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"identity": "scale"}, lambda x, m, mu: 0.4 * x - 0.4 * m),
        ({"average": "unit"}, lambda x, m, mu: x - 0.4 * mu),
        ({"average": "unit", "identity": True}, lambda x, m, mu: 1.4 * x - 0.4 * mu),
    ],
)
def test_other_forms(options, reference):
    torch.manual_seed(1)
    x = torch.randn(2, 30, 6, dtype=torch.float64)
    weight = (unit(x) @ unit(x).mT).softmax(-1)
    torch.testing.assert_close(contra_norm(x, 0.4, **options), reference(x, weight @ x, weight @ unit(x)))


def published_vit(x, s, tau, dual, learned, identity):
    """The published ViT layer with `pre_norm`, up to its LayerNorm: x is replaced by x̂ before the step."""
    x = unit(x)
    sim = x @ x.mT / tau
    mean = (sim.softmax(-1) + sim.softmax(-2) if dual else sim.softmax(-1)) @ x
    if identity:
        return s * x - s * mean if learned else (1 + s) * x - s * mean
    return x - s * mean


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dual", [False, True])
def test_pre_norm_of_the_published_vit_code(identity, learned, dual):
    torch.manual_seed(12)
    x = 3 * torch.randn(2, 30, 6, dtype=torch.float64)
    form = "scale" if identity and learned else identity
    options = {"pre_norm": True, "identity": form, "dual": dual, "learnable": learned, "temperature": 0.6}
    layer = ContraNorm.preset("vit", 6, 0.3, **options).double()
    expected = F.layer_norm(published_vit(x, 0.3, 0.6, dual, learned, identity), (6,), eps=1e-6)
    torch.testing.assert_close(layer(x), expected)
    raw = ContraNorm.preset("vit", 6, 0.3, **options | {"pre_norm": False, "average": "unit"}).double()
    assert (raw(x) - expected).abs().max() > 0.05  # what `average="unit"` is: the step starts at x itself


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("identity", [False, True])
def test_use_norm_of_the_published_arxiv_code(center, identity):
    torch.manual_seed(13)
    x = 3 * torch.randn(40, 7, dtype=torch.float64)
    c = unit(x - x.mean(1, keepdim=True) if center else x)
    mean = c @ (c.T @ c / 0.8).softmax(1)
    expected = 1.5 * c - 0.5 * mean if identity else c - 0.5 * mean
    layer = ContraNorm.preset("arxiv", 7, 0.5, temperature=0.8, pre_norm=True, center=center, identity=identity)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("axis", ["tokens", "features"])
def test_dual_and_center(axis):
    torch.manual_seed(2)
    x = torch.randn(3, 20, 6, dtype=torch.float64)
    c = x - x.mean(-1, keepdim=True)
    sim = unit(c) @ unit(c).mT / 0.7 if axis == "tokens" else unit(c).mT @ unit(c) / 0.7
    weight = sim.softmax(-1) + sim.softmax(-2)
    expected = c - 0.2 * (weight @ c if axis == "tokens" else c @ weight)
    torch.testing.assert_close(contra_norm(x, 0.2, temperature=0.7, dual=True, center=True, axis=axis), expected)


def test_dual_is_the_gradient_of_the_uniformity_loss():
    """Eq. 5: with unit rows, both terms are τ times the gradient of Σ_i log Σ_j exp(h_i·h_j/τ)."""
    torch.manual_seed(3)
    h = unit(torch.randn(25, 5, dtype=torch.float64)).requires_grad_()
    (h @ h.T / 0.5).logsumexp(-1).sum().backward()
    torch.testing.assert_close(
        contra_norm(h.detach(), 0.3, temperature=0.5, dual=True), h.detach() - 0.3 * 0.5 * h.grad
    )


def test_learned_scale():
    torch.manual_seed(4)
    x = torch.randn(2, 10, 4)
    layer = ContraNorm(4, 0.2, learnable=True, positive=True, after=None)
    torch.testing.assert_close(layer(x), contra_norm(x, 0.2))
    assert [name for name, _ in layer.named_parameters()] == ["scale_param"]
    layer(x).square().sum().backward()
    assert layer.scale_param.grad.abs().min() > 0
    plain = ContraNorm(4, 0.0, learnable=True, after=None)
    torch.testing.assert_close(plain(x), x)
    plain(x).square().sum().backward()
    assert plain.scale_param.grad.abs().min() > 0


def test_scale_zero_is_the_identity():
    x = torch.randn(5, 3)
    assert contra_norm(x, 0.0, center=True) is x


def test_after():
    torch.manual_seed(5)
    x = torch.randn(7, 4)
    torch.testing.assert_close(ContraNorm(4, 0.1)(x), F.layer_norm(contra_norm(x, 0.1), (4,)))
    torch.testing.assert_close(ContraNorm(4, 0.1, after="l2")(x), F.normalize(contra_norm(x, 0.1), dim=-1))
    torch.testing.assert_close(ContraNorm(4, 0.1, after=None)(x), contra_norm(x, 0.1))


OPTIONS = [
    {},
    {"identity": True, "temperature": 0.3},
    {"dual": True},
    {"exclude_self": True},
    {"average": "unit"},
    {"pre_norm": True},
    {"pre_norm": True, "center": True, "axis": "features"},
    {"causal": True},
    {"axis": "features"},
    {"axis": "features", "dual": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_mask_is_deletion(options):
    torch.manual_seed(6)
    x = torch.randn(3, 20, 6, dtype=torch.float64)
    mask = torch.rand(3, 20) > 0.4
    bad = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    out = contra_norm(bad, 0.5, mask=mask, **options)
    for i in range(3):
        torch.testing.assert_close(out[i, mask[i]], contra_norm(x[i, mask[i]], 0.5, **options))
    assert torch.isnan(out[~mask]).all()  # unchanged, here NaN
    out[mask].sum().backward()
    assert torch.isfinite(bad.grad[mask]).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_batched_is_looped(options):
    torch.manual_seed(7)
    x = torch.randn(2, 3, 15, 4, dtype=torch.float64)
    out = contra_norm(x, 0.5, **options)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(out[i, j], contra_norm(x[i, j], 0.5, **options))


@pytest.mark.parametrize("options", [o for o in OPTIONS if "causal" not in o])
def test_permutation_equivariance(options):
    torch.manual_seed(8)
    x = torch.randn(30, 4, dtype=torch.float64)
    order = torch.randperm(30)
    torch.testing.assert_close(contra_norm(x[order], 0.5, **options), contra_norm(x, 0.5, **options)[order])


@pytest.mark.parametrize("options", [{}, {"dual": True}, {"exclude_self": True}, {"axis": "features"}, {"edges": True}])
@pytest.mark.parametrize("mixed", [False, True], ids=["sorted", "mixed"])
def test_two_graphs_joined_are_each_alone(options, mixed, monkeypatch):
    monkeypatch.setitem(grid.TILE, "cpu", (8, 64))
    torch.manual_seed(9)
    sizes = (17, 1, 30, 5)
    x = torch.randn(sum(sizes), 4, dtype=torch.float64)
    batch = torch.repeat_interleave(torch.tensor([0, 2, 3, 7]), torch.tensor(sizes))
    if mixed:
        batch = batch[torch.randperm(len(batch))]
    options = dict(options)
    edges = options.pop("edges", False)
    parts = [(batch == b).nonzero().squeeze(1) for b in batch.unique()]
    edge_index = torch.cat([p[torch.randint(0, len(p), (2, 3 * len(p)))] for p in parts], 1) if edges else None
    out = contra_norm(x, 0.5, batch=batch, edge_index=edge_index, **options)
    for part in parts:
        local = None
        if edge_index is not None:
            inside = edge_index[:, torch.isin(edge_index[0], part)]
            local = torch.searchsorted(part, inside)
        torch.testing.assert_close(out[part], contra_norm(x[part], 0.5, edge_index=local, **options))


def test_a_node_adjacent_to_all_others():
    x = torch.randn(4, 3, requires_grad=True)
    star = torch.tensor([[0, 0, 0], [1, 2, 3]])
    out = contra_norm(x, 1.0, identity=True, edge_index=star)
    torch.testing.assert_close(out[0], 2 * x[0])  # nothing to be pushed from
    out.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_degenerate_tokens(options):
    torch.manual_seed(10)
    for x in (torch.zeros(6, 4), torch.ones(6, 4), torch.randn(1, 4), torch.zeros(1, 4), torch.zeros(0, 4)):
        x = x.clone().requires_grad_()
        out = contra_norm(x, 0.5, **options)
        out.sum().backward()
        assert torch.isfinite(out).all()
        assert torch.isfinite(x.grad).all()
        assert x.grad.abs().max() < 100 if x.numel() else True


def test_identical_tokens_stay_identical():
    x = torch.tensor([[1.0, 2.0]]).repeat(5, 1)
    torch.testing.assert_close(contra_norm(x, 0.5), 0.5 * x)
    torch.testing.assert_close(contra_norm(x, 0.5, identity=True), x)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(options, dtype):
    torch.manual_seed(11)
    x = (torch.randn(2, 40, 8) * 50).to(dtype)
    out = contra_norm(x, 0.5, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out, contra_norm(x.float(), 0.5, **options).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("options", [*OPTIONS, {"edge_index": torch.tensor([[0, 1, 2], [1, 2, 5]])}])
def test_gradcheck(options):
    torch.manual_seed(12)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, s: contra_norm(a, s, **options), (x, scale))


def test_causal_reads_no_later_token():
    torch.manual_seed(13)
    x = torch.randn(12, 4, requires_grad=True)
    out = contra_norm(x, 0.5, causal=True)
    for i in range(12):
        (gradient,) = torch.autograd.grad(out[i].sum(), x, retain_graph=True)
        assert gradient[i + 1 :].abs().max().item() == 0 if i < 11 else True
        torch.testing.assert_close(out[i], contra_norm(x[: i + 1], 0.5)[i])


@pytest.mark.parametrize("case", ["plain", "masked", "edges", "graphs", "exclude_self"])
def test_sampled_keys_estimate_all_of_them(case):
    torch.manual_seed(14)
    n = 200
    x = torch.randn(n, 6, dtype=torch.float64) + 0.5
    options = {
        "plain": {},
        "masked": {"mask": torch.rand(n) > 0.3},
        "edges": {"edge_index": torch.randint(0, n, (2, 600))},
        "graphs": {"batch": torch.arange(n) // 50},
        "exclude_self": {"exclude_self": True},
    }[case]
    full = contra_norm(x, 1.0, temperature=0.5, **options)
    draws = torch.stack([contra_norm(x, 1.0, temperature=0.5, sample=30, **options) for _ in range(300)])
    spread = (draws - full).square().sum(-1).mean().sqrt()
    bias = (draws.mean(0) - full).square().sum(-1).mean().sqrt()
    assert spread > 0
    assert bias < 0.15 * spread  # 300 draws leave 0.06 of it by chance
    torch.testing.assert_close(contra_norm(x, 1.0, sample=n, **options), contra_norm(x, 1.0, **options))


def plain_sample(x, unit, absent, chosen):
    """The softmax mean over a sample without more ado: what loses many points in a deep network."""
    weights = (unit @ unit[chosen].T).exp().masked_fill(absent[:, chosen], 0.0)
    return weights @ x[chosen] / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_plain_mean_is_not_left_to_chance(spread):
    """Beside the softmax mean over the sample alone, the error is several times smaller, also where rows differ."""
    torch.manual_seed(3)
    n = 400
    x = (1 + spread * torch.randn(n, 8, dtype=torch.float64)).relu()
    edges = torch.randint(0, n, (2, 1500))
    absent = torch.eye(n, dtype=torch.bool)
    absent[edges[0], edges[1]] = absent[edges[1], edges[0]] = True
    unit = F.normalize(x, dim=1)
    full = x - contra_norm(x, 1.0, edge_index=edges)
    ours = torch.stack([x - contra_norm(x, 1.0, edge_index=edges, sample=100) for _ in range(20)])
    naive = torch.stack([plain_sample(x, unit, absent, torch.randperm(n)[:100]) for _ in range(20)])
    errors = [(found - full).square().mean().sqrt() for found in (ours, naive)]
    assert errors[0] < 0.25 * errors[1]


def test_a_sample_of_neighbours_only_leaves_the_plain_mean():
    """Node 0 knows all but node 9; whenever 9 is not drawn, its mean is still that of 9."""
    torch.manual_seed(0)
    x = torch.randn(10, 3, dtype=torch.float64)
    edges = torch.stack([torch.zeros(8, dtype=torch.long), torch.arange(1, 9)])
    found = torch.stack([contra_norm(x, 1.0, edge_index=edges, sample=2)[0] for _ in range(30)])
    torch.testing.assert_close(found, (x[0] - x[9]).expand_as(found))


def test_samples_of_half_precision_and_of_nothing():
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    for dtype in (torch.float16, torch.bfloat16):
        out = contra_norm(x.to(dtype), 0.5, edge_index=torch.tensor([[0], [1]]), sample=5)
        assert out.dtype == dtype
        assert out.isfinite().all()
    assert contra_norm(torch.zeros(0, 4), 0.5, sample=5).shape == (0, 4)
    assert contra_norm(torch.zeros(30, 4), 0.5, sample=5).abs().max() == 0


def test_samples_are_drawn_from_the_real_tokens_of_each_sequence():
    torch.manual_seed(15)
    x, mask = torch.randn(2, 512, 4, dtype=torch.float64), torch.zeros(2, 512, dtype=torch.bool)
    mask[0, :6], mask[1] = True, True
    sampled = contra_norm(x, 1.0, mask=mask, exclude_self=True, sample=32)
    torch.testing.assert_close(sampled[0], contra_norm(x, 1.0, mask=mask, exclude_self=True)[0])  # all six are taken
    assert not torch.allclose(sampled[1], contra_norm(x, 1.0, mask=mask, exclude_self=True)[1])


def test_sample_is_for_training_only():
    torch.manual_seed(15)
    x = torch.randn(40, 4)
    layer = ContraNorm(4, 0.5, sample=5, after=None)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer.eval()(x), contra_norm(x, 0.5))


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 6), st.integers(0, 2), st.sampled_from(DTYPES), st.booleans(),
    st.sampled_from(OPTIONS), st.floats(-2, 2), st.integers(0, 2**31),
)  # fmt: skip
def test_any_input_keeps_shape_dtype_and_is_finite(n, d, batch, dtype, masked, options, scale, seed):
    torch.manual_seed(seed)
    shape = (batch, n, d) if batch else (n, d)
    x = torch.randn(shape).to(dtype).requires_grad_()
    mask = torch.rand(shape[:-1]) > 0.5 if masked else None
    out = contra_norm(x, scale, mask=mask, **options)
    assert out.shape == x.shape
    assert out.dtype == dtype
    out.float().sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()
    if mask is not None:
        assert torch.equal(out[~mask], x[~mask])


def test_module_survives_copying_and_saving():
    layer = ContraNorm(4, 0.3, learnable=True, temperature=0.5, identity=True)
    x = torch.randn(6, 4)
    other = ContraNorm(4, 0.1, learnable=True, temperature=0.5, identity=True)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    assert layer.extra_repr() == "4, scale=0.3, temperature=0.5, identity=True, learnable=True"
    assert ContraNorm(4, 0.1, dual=True, after=None).extra_repr() == "4, scale=0.1, dual=True, after=None"
    with torch.no_grad():
        layer.scale_param.fill_(7)
    layer.reset_parameters()
    assert layer.scale_param.tolist() == pytest.approx([0.3] * 4)


def test_autocast_changes_nothing():
    x = torch.randn(2, 30, 8)
    for options in OPTIONS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = contra_norm(x, 1.0, **options)
        assert torch.equal(cast, contra_norm(x, 1.0, **options))


def test_rows_of_length_one_in_half_precision():
    out = ContraNorm(4, 0.1, after="l2")(torch.full((3, 4), 4e4, dtype=torch.float16))
    torch.testing.assert_close(out.float().norm(dim=-1), torch.ones(3), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True, "dual": True}, "read later tokens"),
        ({"causal": True, "axis": "features"}, "read later tokens"),
        ({"axis": "rows"}, "axis must be one of"),
        ({"average": "mean"}, "average must be one of"),
        ({"identity": "both"}, "identity must be one of"),
        ({"axis": "features", "exclude_self": True}, "features"),
        ({"sample": 0}, "at least 1"),
        ({"sample": 2, "dual": True}, "sample"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"batch": torch.zeros(4, dtype=torch.long)}, "batch must be an integer tensor"),
        ({"edge_index": torch.tensor([[0], [9]])}, "edge_index must hold indices from 0 to 4"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask must have shape"),
        ({"mask": torch.ones(2, 1, 1, 5, dtype=torch.bool)}, "mask must have shape"),
        ({"axis": "features", "temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        contra_norm(torch.randn(5, 3), 0.1, **options)


def test_bad_module():
    with pytest.raises(ValueError, match="gpt"):
        ContraNorm.preset("gpt", 4, 0.1)
    with pytest.raises(ValueError, match="4 features"):
        ContraNorm(4, 0.1)(torch.randn(3, 5))
    with pytest.raises(ValueError, match="positive needs"):
        ContraNorm(4, 0.1, positive=True)
    with pytest.raises(ValueError, match="after"):
        ContraNorm(4, 0.1, after="batch")
    with pytest.raises(ValueError, match="shape"):
        contra_norm(torch.randn(5), 0.1)
    with pytest.raises(TypeError, match="batch="):
        contra_norm(torch.randn(5, 2), 0.1, mask=torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="axis"):
        ContraNorm(4, 0.1, axis="rows")
    with pytest.raises(ValueError, match="sample"):
        ContraNorm(4, 0.1, dual=True, sample=3)


@pytest.mark.parametrize("temperature", [1e-300, 0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_cannot_work_is_refused_before_the_first_pass(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        ContraNorm(4, 0.3, temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        contra_norm(torch.eye(4), 0.3, temperature=temperature)
