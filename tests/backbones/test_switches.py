"""Switches against a model written out by hand, and a model that is left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.backbones.switches import Switchboard, branches

Flip = Callable[[Switchboard], None]


def encoder(norm_first: bool = False, layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def by_hand(model: Any, x: Tensor, attend: Callable[[Any, Tensor], Tensor], mlp: float, scale: float) -> Tensor:
    """Run a pre-norm encoder with other attention, a scaled MLP, and scaled branches."""
    for layer in model.layers:
        x = x + scale * layer.self_attn.out_proj(attend(layer.self_attn, layer.norm1(x)))
        x = x + scale * mlp * layer.linear2(layer.linear1(layer.norm2(x)).relu())
    return x


def values(attention: Any, x: Tensor) -> Tensor:
    d = attention.embed_dim
    return nn.functional.linear(x, attention.in_proj_weight[2 * d :], attention.in_proj_bias[2 * d :])


def plain(attention: Any, x: Tensor) -> Tensor:
    context = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in context.chunk(3, -1))  # type: ignore[no-untyped-call]
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("flip", "attend", "mlp", "scale"),
    [
        (Switchboard.stop_mixing, values, 1.0, 1.0),
        (Switchboard.uniform_attention, lambda a, x: values(a, x).mean(1, keepdim=True).expand_as(x), 1.0, 1.0),
        (Switchboard.stop_mlp, plain, 0.0, 1.0),
        (Switchboard.double_residual, plain, 1.0, 0.5),
    ],
)
def test_a_switch_equals_the_model_written_out(flip: Flip, attend: Any, mlp: float, scale: float) -> None:
    model, x = encoder(norm_first=True), torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    stack, before = backbones.find(model), model(x)
    with Switchboard(model, stack) as table:
        flip(table)
        with stack.under_hooks(model):
            changed = model(x)
        assert table.acted == (4 if flip is Switchboard.double_residual else 2)
    torch.testing.assert_close(changed, by_hand(model, x, attend, mlp, scale), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, before, atol=1e-3)
    assert torch.equal(model(x), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_uniform_attention_of_huggingface_reads_masks_and_order() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).eval()
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=1, **sizes)
    llama = transformers.LlamaModel(config).eval()
    ids, mask = torch.arange(6)[None], torch.tensor([[1, 1, 1, 1, 0, 0]])
    for model, projection, value in (
        (bert, "encoder.layer.0.attention.output.dense", "encoder.layer.0.attention.self.value"),
        (llama, "layers.0.self_attn.o_proj", "layers.0.self_attn.v_proj"),
    ):
        seen: dict[str, Tensor] = {}
        model.get_submodule(value).register_forward_hook(lambda m, a, out, seen=seen: seen.update(v=out))
        stack = backbones.find(model)
        known = stack.context((), {"input_ids": ids, "attention_mask": mask})
        with Switchboard(model, stack, lambda known=known: known) as table:  # type: ignore[misc]
            table.uniform_attention()
            got = model.get_submodule(projection)
            got.register_forward_pre_hook(lambda m, args, seen=seen: seen.update(context=args[0]))
            model(input_ids=ids, attention_mask=mask)
        v = seen["v"] if model is bert else torch.cat([seen["v"], seen["v"]], -1)  # one value head, two query heads
        for token in range(4):
            real = v[0, : 4 if model is bert else token + 1].mean(0)
            torch.testing.assert_close(seen["context"][0, token], real)


def test_hooks_are_removed_after_an_error_and_after_an_interrupt() -> None:
    model, x = encoder(), torch.randn(2, 4, 16)
    stack = backbones.find(model)

    def run() -> None:
        with Switchboard(model, stack) as table:
            table.stop_mixing()
            table.add_residual()
            model.layers[1].register_forward_pre_hook(_raising(error), prepend=True)
            model(x)

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            run()
        model.layers[1]._forward_pre_hooks.clear()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise error

    return hook


@torch.no_grad()
@pytest.mark.parametrize("sparse", [False, True])
def test_nodes_without_neighbours(sparse: bool) -> None:
    pyg = pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    model = pyg.nn.GCN(8, 16, 3).eval()
    x, edges = torch.randn(10, 8), torch.randint(0, 10, (2, 40))
    graph = pyg.utils.to_torch_csr_tensor(edges.unique(dim=1), size=(10, 10)) if sparse else edges
    with Switchboard(model, backbones.find(model)) as table:
        table.stop_mixing()
        alone = model(x, graph)
    naive = x
    for number, conv in enumerate(model.convs):
        naive = conv.lin(naive) + conv.bias
        naive = naive.relu() if number < 2 else naive
    torch.testing.assert_close(alone, naive)


def test_branches_of_blocks() -> None:
    post, pre = (backbones.find(encoder(first)).blocks[0] for first in (False, True))
    assert [(b.part, b.stream.path, b.stream.side) for b in branches(post)] == [
        ("attention", "layers.0", "input"),
        ("mlp", "layers.0.norm1", "output"),
    ]
    assert [(b.part, b.stream.path, b.stream.side) for b in branches(pre)] == [
        ("attention", "layers.0", "input"),
        ("mlp", "layers.0.norm2", "input"),
    ]
