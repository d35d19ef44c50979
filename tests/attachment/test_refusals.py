"""What cannot work is an error: when it is asked for, with a model as it was, or when the model runs."""

from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.attachment import install

from .by_hand import BY_NAME, GPT2, POST_NORM, PRE_NORM, SCALE, T5, TEXT, assert_clean, hf
from .tiny_models import build

PRE = BY_NAME["encoder-pre-batch-first"]
NUMBERS = (  # that the paper does not have, and the places that are listed instead
    *(("BertModel", number, POST_NORM) for number in (0, 9)),
    *(("AlbertModel", -1, POST_NORM), ("ViTModel", 7, PRE_NORM), ("LlamaModel", 7, PRE_NORM)),
)
VALUES = {  # models whose values of attention are not known
    "T5EncoderModel": T5,
    "GPTBigCodeModel": {**GPT2, "multi_query": False},  # head by head with queries and keys
    "RoFormerModel": {**TEXT, "rotary_value": True},  # rotated after their module
    "ConvBertModel": {**TEXT, "embedding_size": 16},  # half of the heads are convolutions
}


def shared() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.layers[1] = model.layers[0]
    return model


OWN = {
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16),
    "stack": lambda: nn.ModuleDict(  # of blocks that are not known
        {"blocks": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))}
    ),
    "shared": shared,
}


def model_of(name: str) -> Any:
    if name in OWN:
        return OWN[name]()
    if name in VALUES:
        return hf(name, VALUES[name], "").build()
    return BY_NAME[name].model() if name in BY_NAME else build(name).model


STACK = {"modules": ["blocks.*"]}
ROWS: tuple[tuple[str, str, dict[str, Any], str], ...] = (  # model, cure, arguments, words
    (PRE.name, "contra_norm", {"at": "attention.nowhere"}, r"block, attention\.input,"),
    (PRE.name, "contra_norm", {"at": "attention.context"}, r"'attention\.context'"),
    (PRE.name, "contra_norm", {"at": 7}, "number 7"),
    (PRE.name, "contra_norm", {"at": []}, "at least"),
    (PRE.name, "contra_norm", {"layers": 3}, "-3 to"),
    (PRE.name, "contra_norm", {"layers": "embed"}, "not a block"),
    (PRE.name, "contra_norm", {"layers": "final"}, "not a block"),
    (PRE.name, "contra_norm", {"strength": 2}, "'strength'.*scale"),
    (PRE.name, "contra_norm", {"scale": "much"}, r"layers\.0\.norm2: scale"),
    (PRE.name, "contra_norm", {"preset": "best"}, r"'bert'\?"),
    (PRE.name, "contra_norm", {"scale": None}, "scale"),
    (PRE.name, "contra_norm", {"tokens": "some"}, "tokens"),
    (PRE.name, "pair_norm", {"mode": "XX"}, "mode"),
    (PRE.name, "attn_scale", {}, "values"),
    (PRE.name, "attn_scale", {"at": "block"}, r"'attention\.context'"),
    (PRE.name, "drop_edge", {}, "edge_index"),
    (PRE.name, "drop_edge", {"layers": 1}, "layers"),
    *((name, "attn_scale", {}, "values") for name in VALUES),
    ("T5Model-encoder", "contra_norm", {"part": "encoder", "at": "attention.residual"}, r"'attention\.residual'"),
    ("transformer", "contra_norm", {}, "'encoder'.*'decoder'"),
    ("gcn", "contra_norm", {"padding": "counted"}, "padding"),
    ("gcn", "drop_edge", {"padding": "counted"}, "padding"),
    ("gcn", "drop_edge", {"at": "block"}, "'edges'.*'block'"),
    ("gcn", "residual", {"at": "block", "layers": 1}, "input"),  # it bridges a module
    ("gcn", "residual", {"layers": [0, -1]}, "features"),
    ("bert", "initial_residual", {"layers": 0}, "second"),
    ("gcn", "pre_activation_residual", {"layers": 0}, "second"),
    ("albert", "pre_activation_residual", {"at": "block"}, "share"),
    ("bert", "pre_activation_residual", {}, "place"),
    ("bert", "attn_scale", {"padding": "counted"}, "padding"),
    ("bert", "contra_norm", {"padding": "ignored"}, "padding"),
    ("shared", "layer_norm_scaling", {}, "depth"),
    ("stack", "residual", STACK, "at=…: block"),
    ("stack", "contra_norm", {"modules": ["blocks.*.1"], "learnable": True}, r"features.*blocks\.0\.1.*dim="),
    ("stack", "feat_scale", {"modules": ["blocks.*.1"]}, r"features.*blocks\.0\.1"),
    ("stack", "contra_norm", {"modules": ["block.*"]}, r"'block\.\*'"),
    ("stack", "contra_norm", {**STACK, "at": "attention.residual"}, "block, input"),
    ("stack", "contra_norm", {**STACK, "at": "norms"}, "norms.*block, input"),
    ("stack", "pair_norm", {**STACK, "causal": True}, "later"),
    *(
        (name, "contra_norm", {"at": number}, f"number {number}" + "".join(f"(?=.*{place})" for place in places))
        for name, number, places in NUMBERS
    ),
)


@pytest.mark.parametrize(("name", "cure", "options", "words"), ROWS)
def test_mistakes_leave_nothing_behind(name: str, cure: str, options: dict[str, Any], words: str) -> None:
    model = model_of(name)
    with pytest.raises(ValueError, match=words):
        uc.attach(model, cure, **{**({"scale": 0.5} if cure == "contra_norm" else {}), **options})
    assert_clean(model)


def test_unknown_and_unready_cures() -> None:
    model: Any = PRE.model()
    with pytest.raises(KeyError, match="'contra_norm'"):
        uc.attach(model, "contranorm", scale=0.1)
    for given, cure, word in ((model, "contra_norm", "'scale'"), (model, uc.PairNorm(), "PairNorm"), ({}, "x", "dict")):
        with pytest.raises(ValueError, match=word):
            uc.attach(given, cure)
    assert_clean(model)


@pytest.mark.parametrize("inside", [False, True], ids=["between blocks", "within a block"])
def test_a_model_is_never_left_half_changed(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for the third block takes the cures of the first two out again."""
    model, done = PRE.model(), []
    target = "install._add_receivers" if inside else "attach.install"
    original = install._add_receivers if inside else install.install

    def fail(*args: Any) -> Any:
        done.append(args)
        if len(done) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(f"uncollapse.attachment.{target}", fail)
    with pytest.raises(KeyboardInterrupt):
        uc.attach(model, "contra_norm", scale=SCALE, learnable=True)
    assert len(done) == 3
    assert_clean(model)


# --- when the model runs ---


def lower(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def test_masks_of_queries_and_keys() -> None:
    """Refused in an encoder of transformers; in one of torch, if some later tokens are hidden from some tokens."""
    model, ids = build("bert").model, torch.arange(6)[None]
    uc.attach(model, "contra_norm", scale=0.5)
    with pytest.raises(RuntimeError, match="queries"):
        model(ids, attention_mask=lower(6)[None, None])
    model(ids)
    model, x = build("encoder").model, torch.randn(2, 6, 16)
    uc.attach(model, "contra_norm", scale=0.5)
    hidden = ~lower(6)
    hidden[:, :3] = False  # three tokens that all see, as in a prefix language model
    with pytest.raises(RuntimeError, match="later"):
        model(x, mask=hidden)
    model(x, mask=(torch.arange(6)[:, None] - torch.arange(6)).abs() > 2)  # a window hides earlier ones as well


def test_dropped_layers_in_front_of_the_final_norm() -> None:
    """The padding of an earlier pass is not taken for that of this one."""
    model = hf("OPTModel", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 1.0}, "").build().eval()
    uc.attach(model, "contra_norm", scale=0.5, at="final.norm")
    model(torch.arange(6)[None])
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.2"):
        model.train()(torch.arange(6)[None])


def test_blocks_that_are_run_past_hooks() -> None:
    groups = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}
    model = hf("SqueezeBertModel", {**TEXT, "embedding_size": 16, **groups}, "").build()
    with pytest.warns(UserWarning, match="SqueezeBertModule"):
        uc.attach(model, "contra_norm", scale=0.5).remove()
    uc.attach(model, "contra_norm", scale=0.5, modules=["encoder.layers.*"])
    with pytest.warns(UserWarning, match=r"None.*layers\.0"):
        model(torch.arange(6)[None])


def test_named_modules_that_never_run() -> None:
    model, x = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), torch.randn(2, 5, 16)
    with uc.attach(model, "contra_norm", scale=0.5, modules=["self_attn.out_proj"]):
        with pytest.warns(UserWarning, match=r"None.*out_proj"):
            model(x)
        model(x)  # it is said once
    uc.attach(model, "contra_norm", scale=0.5, modules=["linear1", "self_attn.out_proj"], causal=False)
    model(x)  # one of them runs


@pytest.mark.parametrize("cure", ["initial_residual", "value_residual", "neutreno"])
def test_a_pass_without_the_first_block(cure: str) -> None:
    tiny = build("bert")
    uc.attach(tiny.model, cure, scale=0.5)
    tiny.output()
    tiny.model.encoder.layer = tiny.model.encoder.layer[1:]
    with pytest.raises(RuntimeError, match="earlier"):
        tiny.output()


def test_packed_documents() -> None:
    model, six = build("llama").model, torch.arange(6)[None]
    uc.attach(model, "contra_norm", scale=SCALE)
    with pytest.raises(RuntimeError, match="packed"):
        model(six, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    model(six, position_ids=six)
    mask, positions = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 2, 3]])
    model(six, attention_mask=mask, position_ids=positions)  # as `generate` numbers tokens
