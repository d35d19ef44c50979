"""Cures in models of which nothing says whether they are causal: a probe finds out, and changes nothing."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import uncollapse as uc

from .by_hand import assert_clean

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}
WINDOW = {"num_attention_heads": 2, "intermediate_size": 64, "attention_window_size": 16, "lru_width": 32}
NAMED = {"modules": ["backbone.layers.*"]}
RECURRENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Rwkv": ({"attention_hidden_size": 32, "rescale_every": 1}, {}),  # it changes its weights in evaluation
    "RecurrentGemma": (WINDOW, {}),
    "Mamba": ({"state_size": 4}, NAMED),
    "Mamba2": ({"state_size": 4, **HEADS}, NAMED),
}
LISTS = ("rwkv.blocks", "model.layers", "backbone.layers")
OPTIONS: dict[str, Any] = {"scale": 0.5, "temperature": 0.7}


class Mixer(nn.Module):
    """Attention that says to nobody but itself in which order tokens see each other."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(16, 48), causal
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            cache.append(k)
        return x + self.dropout(functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


class Net(nn.Module):
    """A language model that somebody wrote by hand."""

    def __init__(self, causal: bool, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(Mixer(causal) for _ in range(count))
        self.mlps = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, ids: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        x = self.embed(ids)
        for block, mlp in zip(self.blocks, self.mlps, strict=True):
            x = mlp(block(x, cache)).tanh() + x
        return self.head(x)


def recurrent(name: str) -> nn.Module:
    config, model = (getattr(transformers, f"{name}{part}", None) for part in ("Config", "ForCausalLM"))
    if config is None or model is None:
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    return model(config(**SIZES, **RECURRENT[name][0]))


def has_module(model: nn.Module, path: str) -> bool:
    return path in dict(model.named_modules())


def leak(model: nn.Module) -> float:
    """The largest change of an earlier token's logits by the last token."""
    ids = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    other = torch.cat([ids[:, :-1], (ids[:, -1:] + 7) % 40], 1)
    model.eval()
    with torch.no_grad():
        a, b = (getattr(out, "logits", out) for out in (model(ids), model(other)))
    assert not torch.allclose(a[:, -1], b[:, -1], atol=1e-2)
    return float((a - b)[:, :-1].abs().max())


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_found_to_be_causal(name: str) -> None:
    model, where = recurrent(name).train(), RECURRENT[name][1]
    before, random, plain = copy.deepcopy(model.state_dict()), torch.get_rng_state(), copy.deepcopy(model).eval()
    with pytest.warns(UserWarning, match="found to be causal"):
        handle = uc.attach(model, "contra_norm", **where, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for name, module in model.named_modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items() if key in before)
    assert leak(model) < 1e-6
    ids = torch.arange(9)[None]
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)
    handle.remove()
    assert_clean(model)
    assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.filterwarnings("ignore:.*found to be causal", "ignore:.*were not known")
def test_generation_with_a_state_of_earlier_tokens_is_refused(name: str, named: bool) -> None:
    model: Any = recurrent(name).eval()
    prompt, greedy = torch.arange(3, 9)[None], {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    blocks = next(path for path in (f"{part}.*" for part in LISTS) if has_module(model, path[:-2]))
    where = {"modules": [blocks]} if named else RECURRENT[name][1]
    with uc.attach(model, "contra_norm", **where, **OPTIONS):
        tokens = prompt
        for _ in range(4):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(model.generate(prompt, use_cache=False, **greedy), tokens)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model.generate(prompt, use_cache=True, **greedy)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(("cure", "options"), [("pair_norm", {}), ("contra_norm", {"scale": 0.5, "dual": True})])
@pytest.mark.filterwarnings("ignore:.*found to be causal")
def test_cures_that_read_later_tokens_are_refused(name: str, cure: str, options: dict[str, Any]) -> None:
    model = recurrent(name)
    with pytest.raises(ValueError, match=r"later tokens"):
        uc.attach(model, cure, **RECURRENT[name][1], **options)
    assert_clean(model)


@pytest.mark.filterwarnings("ignore:.*found to be causal")
@pytest.mark.parametrize("modules", ["blocks.*", "mlps.*", "mlps.0", "embed"])
def test_the_first_call_shows_a_decoder_written_by_hand(modules: str) -> None:
    model = Net(causal=True)
    handle = uc.attach(model, "contra_norm", modules=modules, **OPTIONS)
    with pytest.warns(UserWarning, match="Net was found to be causal"):
        assert leak(model) < 1e-6
    handle.remove()
    assert_clean(model)
    uc.attach(model, "pair_norm", modules=modules)
    with pytest.raises(RuntimeError, match="later ones"):
        leak(model)


@pytest.mark.filterwarnings("ignore:.*found to be causal")
@pytest.mark.parametrize("cure", ["contra_norm", "pair_norm"])
def test_a_cure_saved_before_there_were_probes_is_probed_when_it_is_loaded(cure: str, tmp_path: Path) -> None:
    model, where = recurrent("Mamba"), RECURRENT["Mamba"][1]
    with uc.attach(model, cure, causal=False, **where, **(OPTIONS if cure == "contra_norm" else {})):
        assert leak(model) > 1e-3
        uc.save_cure(model, tmp_path)
    uc.load_cure(model, tmp_path)  # what the user said holds
    assert leak(model) > 1e-3
    uc.detach(model)
    described = json.loads((tmp_path / "uncollapse.json").read_text())
    assert described["cures"][0].pop("causal_given") is True
    (tmp_path / "uncollapse.json").write_text(json.dumps(described))
    if cure == "pair_norm":
        with pytest.raises(ValueError, match="later tokens"):
            uc.load_cure(model, tmp_path)
        assert_clean(model)
        return
    with pytest.warns(UserWarning, match="found to be causal"):
        uc.load_cure(model, tmp_path)
    assert leak(model) < 1e-6


@pytest.mark.filterwarnings("error")
def test_an_encoder_written_by_hand_is_left_alone() -> None:
    model = Net(causal=False)
    given = uc.attach(model, "contra_norm", modules="blocks.*", causal=False, **OPTIONS)
    expected = leak(model)
    given.remove()
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS)
    assert leak(model) == expected > 1e-3


@pytest.mark.filterwarnings("error")
def test_what_the_user_says_needs_no_probe() -> None:
    for causal in (True, False):
        model = Net(causal=True)
        uc.attach(model, "contra_norm", modules="blocks.*", causal=causal, **OPTIONS)
        assert (leak(model) < 1e-6) == causal
        assert int(model.blocks[0].calls) == 2


@pytest.mark.filterwarnings("ignore:.*found to be causal")
def test_a_probe_leaves_no_trace() -> None:
    model, cache, seen = Net(causal=True).train(), [], []
    model.blocks[0].eval()
    model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS)
    plain = copy.deepcopy(model)
    uc.detach(plain)
    uc.attach(plain, "contra_norm", modules="blocks.*", causal=True, **OPTIONS)
    outputs = []
    for one in (model, plain):
        torch.manual_seed(5)
        outputs.append(one(torch.arange(8)[None], cache))
    assert torch.equal(*outputs)  # also the draws of dropout
    assert len(cache) == 4
    assert len(seen) == 2
    assert [int(block.calls) for block in model.blocks] == [1, 1]
    assert [block.training for block in model.blocks] == [False, True]
    outputs[0].sum().backward()
    assert model.blocks[0].qkv.weight.grad is not None


def test_a_single_token_shows_nothing_and_the_next_call_is_probed() -> None:
    model = Net(causal=True)
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(2, 1, dtype=torch.long))
    with pytest.warns(UserWarning, match="found to be causal"):
        assert leak(model) < 1e-6
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a copy knows it
        assert leak(twin) < 1e-6


def test_padding_at_the_end_is_not_taken_for_the_future() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            return self.layer(x, src_key_padding_mask=padding_mask)

    model, padding = Padded(), torch.arange(8).expand(2, 8) > 5
    uc.attach(model, "contra_norm", modules="layer", **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 8, 16), padding)


class Tokenwise(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails, self.lock = nn.Linear(8, 8), fails, (i for i in "") if fails else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("fails", "said"), [(False, "no token was seen"), (True, "trial run failed.*generator")])
def test_what_cannot_be_found_out_is_said_once(fails: bool, said: str) -> None:
    model, x = Tokenwise(fails), torch.randn(2, 5, 8)
    uc.attach(model, "contra_norm", modules="layer", **OPTIONS)
    with pytest.warns(UserWarning, match=f"(?s){said}.*causal=True or causal=False"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@pytest.mark.filterwarnings("ignore:.*found to be causal")
def test_compiled_code_is_probed_before_or_refused() -> None:
    model, ids = Net(causal=True).eval(), torch.arange(8)[None]
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS)
    with pytest.raises(RuntimeError, match="run the model once before you compile"):
        torch.compile(model, backend="eager")(ids)
    torch.compiler.reset()
    expected = model(ids)
    torch.testing.assert_close(torch.compile(model, backend="eager")(ids), expected)
