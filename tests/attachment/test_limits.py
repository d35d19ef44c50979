"""What cannot work says so, instead of doing nothing or something else."""

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import uncollapse as uc

transformers = pytest.importorskip("transformers")


def test_blocks_that_are_run_past_hooks() -> None:
    groups = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}
    config = transformers.SqueezeBertConfig(
        vocab_size=40,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        **groups,
    )
    model = transformers.SqueezeBertModel(config)
    with pytest.raises(ValueError, match=r"not a known model.*modules=\['encoder.layers.\*'\]"):
        uc.attach(model, "contra_norm", scale=0.5)
    uc.attach(model, "contra_norm", scale=0.5, modules=["encoder.layers.*"])
    with pytest.warns(UserWarning, match=r"None of the modules with a cure ran .*encoder\.layers\.0"):
        model(torch.arange(6)[None])


def test_named_modules_that_never_run() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    with uc.attach(model, "contra_norm", scale=0.5, modules=["self_attn.out_proj"]):
        with pytest.warns(UserWarning, match=r"None of the modules .*self_attn\.out_proj"):
            model(torch.randn(2, 5, 16))
        model(torch.randn(2, 5, 16))  # it is said once
    uc.attach(model, "contra_norm", scale=0.5, modules=["linear1", "self_attn.out_proj"])
    model(torch.randn(2, 5, 16))  # one of them runs


def test_dropped_layers_in_front_of_the_final_norm() -> None:
    """The padding of an earlier pass is not taken for that of this one."""
    config = transformers.OPTConfig(
        vocab_size=40,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        layerdrop=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.OPTModel(config).eval()
    uc.attach(model, "contra_norm", scale=0.5, at="final.norm")
    model(torch.arange(6)[None])
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.1 did not run in this pass"):
        model.train()(torch.arange(6)[None])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_learned_scale_begins_in_the_dtype_of_the_model(dtype: Any) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).to(dtype)
    handle = uc.attach(model, "contra_norm", scale=0.1, learnable=True)
    scales = [next(cure.parameters()) for cure in handle.cures.values()]
    assert all(torch.equal(scale, torch.full((16,), 0.1, dtype=dtype)) for scale in scales)


def test_a_cure_may_have_a_place_of_its_own() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    assert uc.attach(model, "feat_scale").at == ("attention.output",)
    assert uc.attach(model, "contra_norm", scale=0.1).at == ("attention.residual",)


class Loops(nn.Module):
    """Runs whatever it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_a_module_that_loops_over_its_children_does_not_run_the_cure_as_one() -> None:
    torch.manual_seed(0)
    model, x = Loops(), torch.randn(2, 5, 16)
    wrapped = nn.Sequential(model)
    with uc.attach(wrapped, "contra_norm", scale=0.5, modules=["0"]):
        torch.testing.assert_close(wrapped(x), uc.contra_norm(model.second(model.first(x)), 0.5))


# --- masks and threads ---


def lower(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def tiny_bert(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, **options
    )
    return transformers.BertModel(config).eval()


def test_a_mask_of_queries_and_keys_is_refused_in_an_encoder() -> None:
    model, ids = tiny_bert(), torch.arange(6)[None]
    uc.attach(model, "contra_norm", scale=0.5)
    with pytest.raises(RuntimeError, match="queries and keys"):
        model(ids, attention_mask=lower(6)[None, None])
    model(ids)


def test_packed_documents_are_refused() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    model = transformers.LlamaModel(config).eval()
    uc.attach(model, "contra_norm", scale=0.5)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(RuntimeError, match="documents are packed"):
        model(torch.arange(6)[None], position_ids=positions, use_cache=False)
    model(torch.arange(6)[None], position_ids=torch.arange(6)[None], use_cache=False)
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]), "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]])}
    model(torch.arange(6)[None], **padded, use_cache=False)  # as `generate` numbers tokens behind padding


def test_a_mask_that_hides_some_later_tokens_is_refused() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).eval()
    uc.attach(model, "contra_norm", scale=0.5)
    hidden = ~lower(6)
    hidden[:, :3] = False  # three tokens that all see, as in a prefix language model
    with pytest.raises(RuntimeError, match="hides later tokens from some tokens"):
        model(torch.randn(2, 6, 16), mask=hidden)
    window = (torch.arange(6)[:, None] - torch.arange(6)).abs() > 2
    model(torch.randn(2, 6, 16), mask=window)  # nobody says that a token must not know of those


class OwnDecoder(nn.Module):
    """A stack of torch's layers with a triangle that only it knows of, or that it is given."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0) for _ in range(2))
        self.blocks = nn.ModuleList(Hidden(layer) for layer in layers)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Hidden(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, src_mask=~lower(x.shape[1]))
        return out


@pytest.mark.parametrize("tokens", [6, 2])  # two tokens of two sequences: a triangle has the shape of a padding mask
@pytest.mark.parametrize("told", [{"causal": True}, {}])
def test_decoders_by_name(told: dict[str, Any], tokens: int) -> None:
    torch.manual_seed(0)
    model, x = OwnDecoder(), torch.randn(2, tokens, 16)
    given = {} if told else {"mask": lower(tokens)}
    plain = model(x)
    uc.attach(model, "contra_norm", scale=0.5, modules="blocks.*", **told)
    out = model(x, **given)
    assert not torch.allclose(out, plain, atol=1e-2)
    changed = x.clone()
    changed[:, -1] += 1
    torch.testing.assert_close(model(changed, **given)[:, :-1], out[:, :-1])


def test_a_decoder_by_name_takes_no_cure_that_reads_later_tokens() -> None:
    model = OwnDecoder()
    with pytest.raises(ValueError, match="pair_norm reads later tokens"):
        uc.attach(model, "pair_norm", modules=["blocks.*"], causal=True)
    assert not uc.attachments(model)


def test_two_threads_are_refused_or_right() -> None:
    model = tiny_bert()
    uc.attach(model, "contra_norm", scale=0.5)
    batches = [(torch.arange(8)[None], torch.tensor([[1] * n + [0] * (8 - n)])) for n in (3, 8)]
    with torch.no_grad():
        expected = [model(ids, attention_mask=mask).last_hidden_state for ids, mask in batches]
    wrong, refused = [], []

    def run(number: int) -> None:
        ids, mask = batches[number]
        for _ in range(30):
            try:
                with torch.no_grad():
                    out = model(ids, attention_mask=mask).last_hidden_state
            except RuntimeError as error:
                refused.append(str(error))
            else:
                wrong.append(not torch.allclose(out, expected[number], atol=1e-5))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert all("Two threads run" in said or "runs outside of it" in said for said in refused)
    with torch.no_grad():
        ids, mask = batches[0]
        assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, expected[0])


# --- where attachments are found ---


def test_attachments_are_found_from_the_whole_and_from_its_parts() -> None:
    model = transformers.BertForSequenceClassification(tiny_bert().config).eval()
    ids = torch.arange(6)[None]
    plain = model(ids).logits
    first = uc.attach(model.bert, "contra_norm", scale=0.5, layers=0)
    second = uc.attach(model, "contra_norm", scale=0.5, layers=1)
    assert uc.attachments(model) == uc.attachments(model.bert.encoder) == (first, second)
    uc.detach(model.bert)
    assert uc.attachments(model) == ()
    assert torch.equal(model(ids).logits, plain)


def test_a_copied_part_can_be_mended_back() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).eval(),
        torch.randn(2, 5, 16),
    )
    plain = model.layers[0](x)
    handle = uc.attach(model, "contra_norm", scale=0.5)
    copied = copy.deepcopy(model.layers[0])
    uc.detach(copied)
    assert torch.equal(copied(x), plain)
    assert uc.attachments(model) == (handle,)


def test_the_same_cure_at_the_same_place_is_told() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 3)
    uc.attach(model, "contra_norm", scale=0.5, layers="first 2")
    with pytest.warns(UserWarning, match="has this cure there already: contra_norm"):
        uc.attach(model, "contra_norm", scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uc.attach(model, "pair_norm")
        uc.attach(model, "contra_norm", scale=0.5, at="mlp.output")


def test_an_optimizer_that_was_made_before() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    optimizer.add_param_group({"params": handle.parameters()})
    model(torch.randn(2, 5, 16)).square().sum().backward()
    optimizer.step()
    assert all(bool((p != 0.5).any()) for p in handle.parameters())
    assert len(handle.parameters()) == 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x, mask)
        return out


def test_a_second_attachment_by_another_path_leaves_the_first_its_mask() -> None:
    torch.manual_seed(0)
    model, x, mask = Outer(), torch.randn(2, 5, 8), torch.tensor([[1] * 5, [1] * 3 + [0] * 2]).bool()
    uc.attach(model, "contra_norm", scale=0.5, modules="inner.blocks.*")
    expected = model(x, mask)
    assert not torch.allclose(expected, model(x, torch.ones(2, 5).bool()))
    with uc.attach(model.inner, "feat_scale", modules="blocks.*"):
        assert torch.equal(model(x, mask), expected)
    assert torch.equal(model(x, mask), expected)


def test_a_choice_of_passes_that_is_gone_asks_for_nothing_any_more() -> None:
    """Blocks of ALBERT that a checkpoint runs again need no model around them unless passes are chosen."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=40,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.AlbertModel(config)
    uc.attach(model, "contra_norm", scale=0.5)
    uc.attach(model, "feat_scale", layers=[0]).remove()
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    x = torch.randn(2, 5, 16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert bool((x.grad != 0).any())
