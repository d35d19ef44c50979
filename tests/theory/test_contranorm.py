"""The propositions of ContraNorm (arXiv 2303.06562): the first holds, the second needs a stronger condition."""

import torch

from uncollapse import contra_norm, effective_rank, token_variance


def test_proposition_1_the_variance_does_not_fall_below_its_bound():
    """Var(Ht) ≥ (1 + s·σ_min)·Var(Hb) with Ht = ((1+s)I − sĀ)Hb, and σ_min ≤ 0."""
    torch.manual_seed(0)
    for _ in range(400):
        n, d = int(torch.randint(2, 12, ())), int(torch.randint(1, 8, ()))
        h = torch.randn(n, d, dtype=torch.float64) * 10 ** float(torch.empty(()).uniform_(-1, 1))
        s = float(torch.empty(()).uniform_(0, 2))
        unit = torch.nn.functional.normalize(h, dim=-1)
        a = (unit @ unit.T).softmax(-1)
        centre = torch.eye(n, dtype=torch.float64) - 1 / n
        p = centre @ (torch.eye(n, dtype=torch.float64) - a)
        least = torch.linalg.eigvalsh(p + p.T).min()
        assert least <= 1e-12
        after = token_variance(contra_norm(h, s, identity=True))
        assert after >= (1 + s * least) * token_variance(h) - 1e-9 * token_variance(h)


def step(h, s):
    """Prop. 2's form: (1+s)H − s(HHᵀ)H, which maps each singular value σ to (1+s)σ − sσ³."""
    return (1 + s) * h - s * (h @ h.T) @ h


def with_spectrum(values):
    n = len(values)
    left = torch.linalg.qr(torch.randn(n + 2, n, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    return left * values @ right.T


def test_proposition_2_is_false_as_stated():
    torch.manual_seed(0)
    s, values = 1.04, torch.tensor([1.4, 1.0], dtype=torch.float64)
    assert 1 + (1 - values.max() ** 2) * s > 0  # the paper's condition
    h = with_spectrum(values)
    torch.testing.assert_close(effective_rank(h), torch.tensor(1.972, dtype=torch.float64), rtol=0, atol=5e-4)
    torch.testing.assert_close(effective_rank(step(h, s)), torch.tensor(1.016, dtype=torch.float64), rtol=0, atol=5e-4)


def test_proposition_2_holds_where_the_map_is_monotone():
    """1 + (1 − 3σ²_max)s ≥ 0: large singular values grow by less than small ones, and their order is kept."""
    torch.manual_seed(1)
    for _ in range(400):
        values = torch.rand(int(torch.randint(2, 7, ())), dtype=torch.float64) * 1.5 + 0.05
        s = float(torch.rand(())) * 2
        largest = values.max() ** 2
        if 1 + (1 - 3 * largest) * s < 0:
            values = values * ((1 + s) / (3 * s * largest)).sqrt()
        h = with_spectrum(values)
        assert effective_rank(step(h, s)) >= effective_rank(h) - 1e-9


def test_contra_norm_raises_the_rank_of_a_collapsing_stack():
    """Averaging layers pull all tokens together; the step against the average keeps them apart."""
    torch.manual_seed(2)
    x = y = torch.nn.functional.layer_norm(torch.randn(32, 16, dtype=torch.float64), (16,))
    for _ in range(12):
        x = torch.nn.functional.layer_norm(x + 0.5 * x.mean(0), (16,))
        y = torch.nn.functional.layer_norm(contra_norm(y + 0.5 * y.mean(0), 0.5), (16,))
    assert effective_rank(y) > 2 * effective_rank(x)
