"""The kernel against the dense formula in float64, on one tile and on many."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import uncollapse as uc
from uncollapse import pairwise
from uncollapse.pairwise import all_pairs, grid, logsumexp, softmax_mean, walk
from uncollapse.pairwise.numerics import unit_rows
from uncollapse.pairwise.operators import all_pairs_operator, spread_operator

EPS = torch.finfo(torch.float32).eps


def allowed(n, m, causal=False, exclude=None):
    keep = torch.ones(n, m, dtype=torch.bool)
    if causal:
        keep &= keep.tril(m - n)
    if isinstance(exclude, str):
        keep.fill_diagonal_(False)
    elif exclude is not None:
        keep[exclude[0], exclude[1]] = False
    return keep


def dense_mean(q, k, v, *, temperature=1.0, mask=None, causal=False, exclude=None, normalize="rows"):
    """The definition, with all pairs in a matrix."""
    keep = allowed(q.shape[-2], k.shape[-2], causal, exclude).expand(*q.shape[:-1], k.shape[-2])
    dim = -1 if normalize == "rows" else -2
    kept = keep if mask is None else keep & mask[..., None, :]
    summed = kept if normalize == "rows" else keep
    logits = (q @ k.mT / temperature).masked_fill(~summed, -torch.inf)
    weight = logits.masked_fill(~summed.any(dim, keepdim=True), 0).softmax(dim) * kept
    return weight @ v


def dense_log_sum(q, k, *, temperature=1.0, mask=None, causal=False, exclude=None):
    keep = allowed(q.shape[-2], k.shape[-2], causal, exclude).expand(*q.shape[:-1], k.shape[-2])
    keep = keep if mask is None else keep & mask[..., None, :]
    some = keep.any(-1)
    logits = (q @ k.mT / temperature).masked_fill(~keep, -torch.inf).masked_fill(~some[..., None], 0)
    return logits.logsumexp(-1).masked_fill(~some, -torch.inf)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setitem(grid.TILE, "cpu", (64, 1 << 13))


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def assert_exact(ours, theirs, inputs, references, logit, floor):
    """Norm-wise relative error at most 16·ε·max(1, max|logit|), beyond what float64 itself leaves unsure."""
    gradient = torch.randn(ours.shape)
    ours.backward(gradient)
    theirs.backward(gradient.double())
    pairs = [("value", ours.detach(), theirs.detach())]
    pairs += [(f"gradient {i}", a.grad, b.grad) for i, (a, b) in enumerate(zip(inputs, references, strict=True))]
    for name, got, want in pairs:
        error, bound = (got.double() - want).norm(), 16 * EPS * max(1.0, logit) * want.norm() + floor
        assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}, size {want.norm():.3g}"


CASES = {
    "all": {},
    "mask": {"mask": True},
    "causal": {"causal": True},
    "pairs": {"exclude": "pairs"},
    "mirrored pairs": {"exclude": "mirrored"},
    "self": {"exclude": "self"},
    "all of it": {"mask": True, "causal": True, "exclude": "pairs"},
}


def options(case, n, m):
    made = dict(CASES[case])
    if "mask" in made:
        made["mask"] = torch.rand(m) > 0.4
    if made.get("exclude") in ("pairs", "mirrored"):
        pairs = torch.stack([torch.randint(0, n, (3 * n,)), torch.randint(0, m, (3 * n,))])
        made["exclude"] = torch.cat([pairs, pairs.flip(0)], 1) if made["exclude"] == "mirrored" else pairs
    return made


@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("same", [True, False], ids=["q is k", "q and k"])
@pytest.mark.parametrize("case", CASES)
def test_exact(tiles, case, same, temperature):
    torch.manual_seed(0)
    n = 300
    m = n if same or "self" in case or "mirrored" in case else n + 7
    x, y = F.normalize(torch.randn(n, 64), dim=-1), F.normalize(torch.randn(m, 64), dim=-1)
    x[3] = 0  # a zero row
    v = torch.randn(m, 48) * 1e4 / 7  # rows of norm 1e4
    opts = options(case, n, m) | {"temperature": temperature}
    for normalize in ("rows", "columns"):
        inputs = leaves(x, v) if same else leaves(x, v, y)
        references = leaves(*(t.detach().double() for t in inputs))
        q, w, k = inputs if not same else (*inputs, inputs[0])
        q6, w6, k6 = references if not same else (*references, references[0])
        logit = float((q6 @ k6.mT).detach().abs().max()) / temperature
        floor = torch.finfo(torch.float64).eps * 1e4 * n * 48 / temperature
        ours = softmax_mean(q, k, w, normalize=normalize, **opts)
        assert_exact(ours, dense_mean(q6, k6, w6, normalize=normalize, **opts), inputs, references, logit, floor)
    inputs = leaves(x) if same else leaves(x, y)
    references = leaves(*(t.detach().double() for t in inputs))
    ours, theirs = logsumexp(inputs[0], inputs[-1], **opts), dense_log_sum(references[0], references[-1], **opts)
    assert torch.equal(torch.isneginf(ours), torch.isneginf(theirs))
    some = ~torch.isneginf(ours)
    assert_exact(ours[some], theirs[some], inputs, references, logit, 0.0)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("normalize", ["rows", "columns"])
def test_one_key_of_many(same, normalize):
    torch.manual_seed(1)
    x, y = F.normalize(torch.randn(3000, 16), dim=-1), F.normalize(torch.randn(3000, 16), dim=-1)
    v = torch.randn(3000, 16) * 2500
    mask = torch.zeros(3000, dtype=torch.bool)
    mask[1234] = True
    inputs = leaves(x, v) if same else leaves(x, v, y)
    references = leaves(*(t.detach().double() for t in inputs))
    opts = {"temperature": 0.05, "mask": mask, "normalize": normalize}
    ours = softmax_mean(inputs[0], inputs[0] if same else inputs[2], inputs[1], **opts)
    theirs = dense_mean(references[0], references[0] if same else references[2], references[1], **opts)
    assert_exact(ours, theirs, inputs, references, 20.0, 1e-9)
    if normalize == "rows":  # one key: no weight can move, so the gradients of q and k are zero, not nearly zero
        assert all(t.grad.abs().max() == 0 for t in [inputs[0], *inputs[2:]])


def test_a_token_that_outweighs_all_others_keeps_its_small_gradient():
    torch.manual_seed(2)
    x = F.normalize(torch.randn(40, 32), dim=-1)
    v, gradient = torch.randn(40, 8), torch.randn(40, 8)
    grads = []
    for dtype in (torch.float32, torch.float64):
        q, w = leaves(x.to(dtype), v.to(dtype))
        softmax_mean(q, q, w, temperature=0.05).backward(gradient.to(dtype))
        grads.append(q.grad.double())
    dense, w = leaves(x, v)
    dense_mean(dense, dense, w, temperature=0.05).backward(gradient)
    error, plain = (grads[0] - grads[1]).norm() / grads[1].norm(), (dense.grad - grads[1]).norm() / grads[1].norm()
    assert error < 16 * EPS * 20
    assert plain > 10 * error  # the plain formula in float32 loses these digits


@pytest.mark.parametrize("normalize", ["rows", "columns"])
def test_nothing_left(tiles, normalize):
    torch.manual_seed(3)
    q, k, v = leaves(torch.randn(2, 130, 8), torch.randn(2, 120, 8), torch.randn(2, 120, 5))
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[1] = False
    mean = softmax_mean(q, k, v, mask=mask, causal=True, normalize=normalize)  # the first ten queries see no key
    assert mean[1].abs().max() == 0
    assert mean[0, :10].abs().max() == 0
    assert mean[0, 10:].abs().min(-1).values.gt(0).all()
    log_sum = logsumexp(q, k, mask=mask, causal=True)
    assert torch.isneginf(log_sum[1]).all()
    assert torch.isneginf(log_sum[0]).sum() == 10
    (mean.sum() + log_sum.exp().sum()).backward()
    for t in (q, k, v):
        assert torch.isfinite(t.grad).all()
        assert t.grad[1].abs().max() == 0
    everything = torch.cartesian_prod(torch.arange(130), torch.arange(120)).T
    assert softmax_mean(q, k, v, exclude=everything, normalize=normalize).abs().max() == 0


@pytest.mark.parametrize("same", [True, False])
def test_small_counts(same):
    for n, m in ((1, 1), (1, 3), (2, 1)):
        m = n if same else m
        q, v = torch.randn(n, 4, dtype=torch.float64), torch.randn(m, 2, dtype=torch.float64)
        k = q if same else torch.randn(m, 4, dtype=torch.float64)
        torch.testing.assert_close(softmax_mean(q, k, v), dense_mean(q, k, v))
    for shape in ((0, 4), (3, 0, 4)):
        empty = torch.zeros(shape, requires_grad=True)
        mean = softmax_mean(empty, empty, empty)
        mean.sum().backward()
        assert mean.shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(tiles, dtype):
    torch.manual_seed(4)
    q, k, v = leaves(*(torch.randn(300, 16).to(dtype) for _ in range(3)))
    ours = softmax_mean(q, k, v, temperature=2.0)
    assert ours.dtype == dtype
    wide = leaves(*(t.detach().float() for t in (q, k, v)))
    theirs = softmax_mean(*wide, temperature=2.0)
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=0, atol=0)
    gradient = torch.randn(300, 16).to(dtype)
    ours.backward(gradient)
    theirs.backward(gradient.float())
    for a, b in zip((q, k, v), wide, strict=True):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad, b.grad.to(dtype), rtol=0, atol=0)
    assert logsumexp(q, k).dtype == dtype


def test_autocast_changes_nothing():
    torch.manual_seed(5)
    x = torch.randn(300, 16)
    plain, cast = leaves(x, x)
    a = softmax_mean(plain, plain, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = softmax_mean(cast, cast, cast)
        b.square().sum().backward()
    a.square().sum().backward()
    assert torch.equal(a, b)
    assert torch.equal(plain.grad, cast.grad)


@pytest.mark.parametrize("normalize", ["rows", "columns"])
def test_compiles_without_a_break(normalize):
    torch.manual_seed(6)
    mask = torch.rand(70) > 0.3

    def run(x, v):
        return softmax_mean(x, x, v, mask=mask, exclude="self", normalize=normalize).sin() + logsumexp(x, x).sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for n in (70,):
        a, v, b, w = leaves(torch.randn(n, 8), torch.randn(n, 8)) * 2
        one, two = run(a, v), compiled(b, w)
        one.sum().backward()
        two.sum().backward()
        torch.testing.assert_close(one, two)
    args = (None, False, None, True, None, None)
    x, v = torch.randn(2, 70, 8, requires_grad=True), torch.randn(2, 70, 3, requires_grad=True)
    torch.library.opcheck(spread_operator, (x, None, v, torch.zeros(2, 70), 0.5, *args))
    for keep in (False, True):
        torch.library.opcheck(all_pairs_operator, (x, None, v, torch.zeros(2, 70), 0.5, keep, *args))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalize", ["rows", "columns"])
def test_gradcheck(monkeypatch, case, normalize):
    monkeypatch.setitem(grid.TILE, "cpu", (4, 16))
    torch.manual_seed(7)
    n = 9
    opts = options(case, n, n)
    q, k, v = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for d in (3, 3, 2))
    assert torch.autograd.gradcheck(lambda *a: softmax_mean(*a, normalize=normalize, **opts), (q, k, v))
    assert torch.autograd.gradcheck(lambda a, b: softmax_mean(a, a, b, normalize=normalize, **opts), (q, v))
    if normalize == "rows":
        assert torch.autograd.gradcheck(lambda a: logsumexp(a, a, **opts).nan_to_num(0, 0, 0), (q,))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.02])
def test_gradients_with_weights_that_are_kept(monkeypatch, case, temperature):
    """Where values are as wide as there are keys, the weights of the forward pass serve the backward pass."""
    torch.manual_seed(71)
    n = 6
    opts = options(case, n, n) | {"temperature": temperature}
    q, k, v = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for d in (3, 3, n))
    assert torch.autograd.gradcheck(lambda *a: softmax_mean(*a, **opts), (q, k, v))
    assert torch.autograd.gradcheck(lambda a, b: softmax_mean(a, a, b, **opts), (q, v))
    mean = softmax_mean(q, q, v, **opts).sin().sum()
    twice = [torch.autograd.grad(mean, (q, v), retain_graph=True) for _ in range(2)]
    monkeypatch.setattr(pairwise, "keeps_weights", lambda *_: False)
    anew = torch.autograd.grad(softmax_mean(q, q, v, **opts).sin().sum(), (q, v))
    for found in twice:
        torch.testing.assert_close(found, anew)


def test_weights_are_kept_where_they_are_no_larger_than_the_means():
    cpu, pairs = torch.device("cpu"), grid.Pairs()
    assert [grid.keeps_weights(pairs, 20, 20, width, cpu) for width in (0, 19, 20)] == [False, False, True]
    assert not grid.keeps_weights(grid.Pairs(offset=0), 20, 20, 20, cpu)
    assert not grid.keeps_weights(pairs, 2000, 2000, 2000, cpu), "more than a tile"
    x, v = torch.randn(2, 20, 8), torch.randn(2, 20, 20)
    weight = walk.forward(x, None, v, None, 1.0, pairs, keep=True)[3]
    torch.testing.assert_close(weight, (x @ x.mT).softmax(-1))
    assert walk.forward(x, None, v, None, 1.0, pairs)[3].shape == (2, 0, 0)


def test_export_with_any_number_of_rows():
    """Below and beyond as many rows as features: an exported program has one way for both."""

    class Layer(torch.nn.Module):
        def forward(self, x):
            return softmax_mean(x, x, x)

    x = torch.randn(2, 20, 32)
    rows = torch.export.Dim("rows", min=2, max=4000)
    exported = torch.export.export(Layer(), (x,), dynamic_shapes={"x": {1: rows}}).module()
    for n in (20, 32, 50):
        y = torch.randn(2, n, 32)
        torch.testing.assert_close(exported(y), softmax_mean(y, y, y))


def test_gradients_of_one_output_alone():
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    mean, log_sum = all_pairs(x, x, x, 1.0, grid.Pairs())
    both = torch.autograd.grad(mean.sum() + log_sum.sum(), x, retain_graph=True)[0]
    parts = [torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in (mean, log_sum)]
    torch.testing.assert_close(both, parts[0] + parts[1])


def test_bias_and_temperature_are_differentiable(monkeypatch):
    monkeypatch.setitem(grid.TILE, "cpu", (4, 16))
    torch.manual_seed(8)
    x, v, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((9, 3), (9, 2), (9,)))
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for k in (x, torch.randn(9, 3, dtype=torch.float64)):
        fn = lambda a, b, c, t, k=k: all_pairs(a, a if k is x else k, b, t, grid.Pairs(), c)  # noqa: E731
        assert torch.autograd.gradcheck(fn, (x, v, bias, tau))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3), st.sampled_from([0.05, 1.0, 8.0]),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["rows", "columns"]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_options(n, m, batch, e, tau, same, masked, causal, normalize, seed):
    torch.manual_seed(seed)
    m = n if same else m
    shape = (batch,) if batch else ()
    q, v = torch.randn(*shape, n, 3, dtype=torch.float64), torch.randn(*shape, m, e, dtype=torch.float64)
    k = q if same else torch.randn(*shape, m, 3, dtype=torch.float64)
    mask = torch.rand(*shape, m) > 0.5 if masked else None
    count = int(torch.randint(0, n * m, (1,)))
    exclude = torch.stack([torch.randint(0, n, (count,)), torch.randint(0, m, (count,))])
    opts = {"temperature": tau, "mask": mask, "causal": causal, "exclude": exclude}
    torch.testing.assert_close(
        softmax_mean(q, k, v, normalize=normalize, **opts), dense_mean(q, k, v, normalize=normalize, **opts)
    )
    torch.testing.assert_close(logsumexp(q, k, **opts), dense_log_sum(q, k, **opts))


def test_masked_keys_may_hold_anything(tiles):
    torch.manual_seed(9)
    x, v = torch.randn(300, 8), torch.randn(300, 4)
    mask = torch.rand(300) > 0.5
    bad_x, bad_v = x.clone(), v.clone()
    bad_x[~mask], bad_v[~mask] = torch.nan, torch.inf
    k, w = leaves(bad_x, bad_v)
    mean = softmax_mean(x, k, w, mask=mask)
    torch.testing.assert_close(mean, softmax_mean(x, x[mask], v[mask]), rtol=1e-5, atol=1e-6)
    mean.sum().backward()
    assert torch.isfinite(k.grad).all()
    assert torch.isfinite(w.grad).all()


def test_batched_is_looped_and_broadcasts(tiles):
    torch.manual_seed(10)
    q, k, v = torch.randn(3, 2, 90, 8), torch.randn(2, 100, 8), torch.randn(3, 1, 100, 5)
    mask = torch.rand(3, 1, 100) > 0.3
    out = softmax_mean(q, k, v, mask=mask, temperature=0.5)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(
                out[i, j], softmax_mean(q[i, j], k[j], v[i, 0], mask=mask[i, 0], temperature=0.5)
            )


def test_permuting_queries_and_keys(tiles):
    torch.manual_seed(11)
    x, v = torch.randn(200, 8, dtype=torch.float64), torch.randn(200, 4, dtype=torch.float64)
    order = torch.randperm(200)
    y = x[order]
    torch.testing.assert_close(
        softmax_mean(y, y, v[order], exclude="self"), softmax_mean(x, x, v, exclude="self")[order]
    )


def test_both_walks_are_used(tiles, monkeypatch):
    """The symmetric walk serves q = k beyond one tile; rows that one key outweighs go to the other."""
    torch.manual_seed(12)
    x = unit_rows(torch.randn(1, 300, 8))
    several = grid.TILE["cpu"][0] < 300
    for temperature, kind in ((1.0, grid.SYMMETRIC if several else grid.PLAIN), (0.02, grid.DOMINATED)):
        assert walk.forward(x, None, x, None, temperature, grid.Pairs())[2].unique().tolist() == [kind]
    assert walk.forward(x, x, x, None, 1.0, grid.Pairs())[2].unique().tolist() == [grid.PLAIN]


def test_large_logits():
    """Beyond the range of exp: the shifted walk takes over."""
    torch.manual_seed(13)
    x, v = torch.randn(2000, 16) * 30, torch.randn(2000, 4)
    double = dense_mean(x.double(), x.double(), v.double())
    torch.testing.assert_close(softmax_mean(x, x, v), double.float(), rtol=1e-3, atol=1e-3)
    assert torch.isfinite(logsumexp(x, x)).all()


MEMORY = """
import sys, torch
from pathlib import Path
from uncollapse.pairwise import softmax_mean
torch.manual_seed(0)
same = sys.argv[1] == "same"
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
def run(n):
    x = torch.nn.functional.normalize(torch.randn(n, 32), dim=-1).requires_grad_()
    k = x if same else torch.randn(n, 32, requires_grad=True)
    pairs = torch.randint(0, n, (2, 4 * n))
    softmax_mean(x, k, x, exclude=torch.cat([pairs, pairs.flip(0)], 1)).sum().backward()
run(2048)
before = peak()
run(12288)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
@pytest.mark.parametrize("same", ["same", "other"])
def test_memory_is_linear(same):
    """One dense matrix at this size takes 576 MiB."""
    done = subprocess.run([sys.executable, "-c", MEMORY, same], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: softmax_mean(x, x[:, :2], x), "same number of features"),
        (lambda x: softmax_mean(x, x, x[:3]), "one row per key"),
        (lambda x: softmax_mean(x[0], x, x), "q must be a float tensor"),
        (lambda x: softmax_mean(x.long(), x, x), "q must be a float tensor"),
        (lambda x: softmax_mean(x, x, x, temperature=0.0), "temperature must be positive"),
        (lambda x: softmax_mean(x, x, x, normalize="both"), "normalize"),
        (lambda x: softmax_mean(x, x, x, mask=torch.ones(5, dtype=torch.long)), "mask must be bool"),
        (lambda x: softmax_mean(x, x, x, mask=torch.ones(4, dtype=torch.bool)), "mask must have shape"),
        (lambda x: softmax_mean(x, x, x, mask=torch.ones(2, 1, 1, 5, dtype=torch.bool)), "mask must have shape"),
        (lambda x: softmax_mean(x, x, x, temperature=torch.tensor(-1.0)), "temperature must be positive"),
        (lambda x: softmax_mean(x, x, x, temperature=torch.ones(4)), "tensor with one element"),
        (lambda x: softmax_mean(x, x, x, exclude="others"), "exclude"),
        (lambda x: softmax_mean(x, x[:3], x[:3], exclude="self"), "as many keys as queries"),
        (
            lambda x: softmax_mean(x, x, x, exclude=torch.ones(3, 4, dtype=torch.long)),
            "exclude must be an integer tensor",
        ),
        (lambda x: softmax_mean(x, x, x, exclude=torch.full((2, 1), 5)), "indices from 0 to 4"),
        (lambda x: logsumexp(x, x, exclude=torch.full((2, 1), -1)), "minimum of -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.randn(5, 4))


def test_two_keys_that_nearly_tie():
    """Neither rules: both hold about half of the row."""
    for seed in (1492, *range(40)):
        torch.manual_seed(seed)
        q = F.normalize(torch.randn(8, 16), dim=-1)
        k = q[:4].clone()
        k[1] = k[0] * (1 - 6e-7 * torch.rand(()))
        v, gradient = torch.randn(4, 4), torch.randn(8, 4)
        inputs = leaves(q, k, v)
        references = leaves(*(t.double() for t in (q, k, v)))
        softmax_mean(*inputs, temperature=0.02).backward(gradient)
        dense_mean(*references, temperature=0.02).backward(gradient.double())
        for a, b in zip(inputs[1:], references[1:], strict=True):  # that of q itself cancels between equal keys
            assert (a.grad - b.grad).norm() <= 16 * EPS * 50 * b.grad.norm()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.sampled_from([0.05, 0.5, 4.0]), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_float32_gradients_of_any_rows(n, tau, same, copies, seed):
    torch.manual_seed(seed)
    x, y, v = F.normalize(torch.randn(n, 6), dim=-1), F.normalize(torch.randn(n, 6), dim=-1), torch.randn(n, 3)
    if copies:  # some rows are equal, or nearly
        x[n // 2 :] = x[: n - n // 2] + torch.randint(0, 2, (n - n // 2, 1)) * 1e-7
    inputs = leaves(x, v) if same else leaves(x, v, y)
    references = leaves(*(t.detach().double() for t in inputs))
    gradient = torch.randn(n, 3)
    opts = {"temperature": tau, "exclude": "self" if same else None}
    softmax_mean(inputs[0], inputs[0 if same else 2], inputs[1], **opts).backward(gradient)
    dense_mean(references[0], references[0 if same else 2], references[1], **opts).backward(gradient.double())
    floor = EPS * max(1, 1 / tau) / tau * gradient.norm() * v.norm()  # where copies make the true gradient vanish
    for a, b in zip(inputs, references, strict=True):
        assert (a.grad - b.grad).norm() <= 16 * EPS * max(1, 1 / tau) * b.grad.norm() + floor


def test_large_values_do_not_overflow(tiles):
    x = F.normalize(torch.randn(2000, 4), dim=-1)
    assert torch.isfinite(softmax_mean(x, x, torch.full((2000, 2), 1e12), temperature=1 / 59)).all()


def test_inference_mode_leaves_no_trace():
    x = torch.randn(50, 4)
    with torch.inference_mode():
        softmax_mean(x, x, x.repeat(1, 3))
    y = x.clone().requires_grad_()
    softmax_mean(y, y, y).sum().backward()
    assert torch.isfinite(y.grad).all()


def test_fewest_keys_is_a_lower_bound_and_finds_hubs() -> None:
    """Where each query has many keys, peaks are not looked for; one that has few keys left must be noticed."""
    cpu, group = torch.device("cpu"), torch.tensor([0] * 5 + [1] * 3)
    hub = torch.stack([torch.zeros(6, dtype=torch.long), torch.arange(1, 7)])
    for pairs, fewest in (
        (grid.Pairs(), 8),
        (grid.Pairs(no_self=True), 7),
        (grid.Pairs(no_self=True, excluded=hub), 1),
        (grid.Pairs(excluded=hub[:, :0]), 8),
        (grid.Pairs(row_group=group, key_group=group), 3),
    ):
        assert grid.Grid(pairs, 8, 8, cpu).fewest_keys() == fewest


def test_a_node_with_one_key_left_keeps_its_exact_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid.TILE, "cpu", (32, 1 << 10))
    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
    hub = torch.stack([torch.zeros(88, dtype=torch.long), torch.arange(1, 89)])
    found = []
    for rows in (x, x.double()):
        leaf = rows.clone().requires_grad_()
        uc.contra_norm(leaf, 0.5, edge_index=hub).square().sum().backward()
        found.append(leaf.grad.double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
