"""Causal models: a probe finds out whether a model is one, and cured decoders generate without a cache."""

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

from .by_hand import BART, DECODER, GPT2, SCALE, assert_clean

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
    with pytest.warns(UserWarning, match="causal"):
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
    for cure, options in (("pair_norm", {}), ("contra_norm", {"scale": 0.5, "dual": True})):  # they read later tokens
        with pytest.raises(ValueError, match="later"), warnings.catch_warnings(action="ignore"):
            uc.attach(model, cure, **where, **options)
        assert_clean(model)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.filterwarnings("ignore:.*found to be causal", "ignore:.*were not known")
def test_generation_with_a_state_of_earlier_tokens_is_refused(name: str, named: bool) -> None:
    model: Any = recurrent(name).eval()
    prompt, greedy = torch.arange(3, 9)[None], {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    blocks = next(path for path in LISTS if path in dict(model.named_modules()))
    where = {"modules": [f"{blocks}.*"]} if named else RECURRENT[name][1]
    with uc.attach(model, "contra_norm", **where, **OPTIONS):
        tokens = prompt
        for _ in range(4):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(model.generate(prompt, use_cache=False, **greedy), tokens)
        with pytest.raises(RuntimeError, match="use_cache"):
            model.generate(prompt, use_cache=True, **greedy)


@pytest.mark.filterwarnings("ignore:.*found to be causal")
@pytest.mark.parametrize("modules", ["blocks.*", "mlps.*", "mlps.0", "embed"])
def test_the_first_call_shows_a_decoder_written_by_hand(modules: str) -> None:
    model = Net(causal=True)
    handle = uc.attach(model, "contra_norm", modules=modules, **OPTIONS)
    with pytest.warns(UserWarning, match="Net .*causal"):
        assert leak(model) < 1e-6
    handle.remove()
    assert_clean(model)
    uc.attach(model, "pair_norm", modules=modules)
    with pytest.raises(RuntimeError, match="later"):
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
        with pytest.raises(ValueError, match="later"):
            uc.load_cure(model, tmp_path)
        assert_clean(model)
        return
    with pytest.warns(UserWarning, match="causal"):
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
    with pytest.warns(UserWarning, match="causal"):
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


@pytest.mark.parametrize(("fails", "said"), [(False, "no token"), (True, "failed.*generator")])
def test_what_cannot_be_found_out_is_said_once(fails: bool, said: str) -> None:
    model, x = Tokenwise(fails), torch.randn(2, 5, 8)
    uc.attach(model, "contra_norm", modules="layer", **OPTIONS)
    with pytest.warns(UserWarning, match=said):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@pytest.mark.filterwarnings("ignore:.*found to be causal")
def test_compiled_code_is_probed_before_or_refused() -> None:
    model, ids = Net(causal=True).eval(), torch.arange(8)[None]
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS)
    with pytest.raises(RuntimeError, match="before you"):
        torch.compile(model, backend="eager")(ids)
    torch.compiler.reset()
    expected = model(ids)
    torch.testing.assert_close(torch.compile(model, backend="eager")(ids), expected)


# --- generation: as a loop of full passes, or the cache is refused ---

ENDLESS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "Gemma2ForCausalLM": ("Gemma2Config", {**DECODER, "sliding_window": 4}),
    "BartForConditionalGeneration": ("BartConfig", {**BART, "forced_eos_token_id": None, "decoder_start_token_id": 1}),
}
DECODERS = list(MODELS)[:3]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
TOKENS = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(1))
PROMPT = TOKENS[:1, :5]


def build_decoder(name: str) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, kind)(**{**config, **ENDLESS})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def greedy(model: Any, tokens: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """A loop of full forward passes: the tokens, and the logits of each step."""
    key, steps = "decoder_input_ids" if given else "input_ids", []
    for _ in range(GREEDY["max_new_tokens"]):
        steps.append(model(**{key: tokens}, **given, use_cache=False).logits[:, -1])
        tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(steps)


def generated(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Likewise, by the library."""
    found = model.generate(**given, **GREEDY, output_logits=True, return_dict_in_generate=True)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("place", ["attention.residual", "block", "attention.input"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_without_a_cache_is_a_loop_of_full_passes(name: str, place: str) -> None:
    """Also with padding on the left, next to a longer sequence."""
    model = build_decoder(name)
    plain, plain_logits = greedy(model, PROMPT)
    with uc.attach(model, "contra_norm", scale=SCALE, at=place):
        expected, logits = greedy(model, PROMPT)
        alone, alone_logits = generated(model, input_ids=PROMPT, use_cache=False)
        mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
        batch = torch.cat([torch.cat([torch.zeros(1, 3).long(), PROMPT], 1), TOKENS[1:]])
        padded, padded_logits = generated(model, input_ids=batch, attention_mask=mask, use_cache=False)
    assert (logits[0] - plain_logits[0]).abs().max() > 1e-2
    assert torch.equal(alone, expected)
    assert torch.equal(padded[:1, 3:], expected)
    torch.testing.assert_close(alone_logits, logits, rtol=0, atol=1e-3)
    torch.testing.assert_close(padded_logits[:, :1], logits, rtol=0, atol=1e-3)
    assert torch.equal(generated(model, input_ids=PROMPT)[0], plain)  # with a cache again


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_is_refused_once_it_holds_tokens(name: str) -> None:
    model = build_decoder(name)
    with uc.attach(model, "contra_norm", scale=SCALE):
        expected = model(PROMPT, use_cache=False).logits
        first = model(PROMPT, use_cache=True)
        torch.testing.assert_close(first.logits, expected)  # an empty cache hides nothing
        for call in (
            lambda: model(PROMPT[:, :1], past_key_values=first.past_key_values),
            lambda: model.generate(PROMPT, **GREEDY),
            lambda: model.generate(PROMPT, cache_implementation="static", disable_compile=True, **GREEDY),
        ):
            with pytest.raises(RuntimeError, match="use_cache"):
                call()
        torch.testing.assert_close(model(PROMPT, use_cache=False).logits, expected)  # an error leaves nothing behind


def test_generation_of_an_encoder_decoder() -> None:
    model, begin = build_decoder("BartForConditionalGeneration"), torch.ones(2, 1, dtype=torch.long)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    given = {"input_ids": TOKENS * mask, "attention_mask": mask, "num_beams": 1}
    known = {"encoder_outputs": model.model.encoder(TOKENS * mask, mask), "attention_mask": mask}
    plain, _ = greedy(model, begin, **known)
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.decoder"):
        expected, _ = greedy(model, begin, **known)
        assert torch.equal(model.generate(**given, use_cache=False, **GREEDY), expected)
        with pytest.raises(RuntimeError, match="use_cache"):
            model.generate(**given, **GREEDY)
    assert not torch.equal(plain, expected)
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.encoder"):  # it runs once; the cache is not its own
        changed = model.generate(**given, **GREEDY)
        assert torch.equal(model.generate(**given, use_cache=False, **GREEDY), changed)
