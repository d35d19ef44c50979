"""Cured decoders generate as a loop of full passes does, or refuse the cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

import uncollapse as uc

from .by_hand import BART, DECODER, SCALE, transformers
from .by_hand import GPT2 as GPT2_SIZES

ENDLESS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2_SIZES),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "Gemma2ForCausalLM": ("Gemma2Config", {**DECODER, "sliding_window": 4}),
    "BartForConditionalGeneration": ("BartConfig", {**BART, "forced_eos_token_id": None, "decoder_start_token_id": 1}),
}
DECODERS = list(MODELS)[:3]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
TOKENS = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(1))
PROMPT = TOKENS[:1, :5]


def build(name: str) -> Any:
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
    model = build(name)
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
    model = build(name)
    with uc.attach(model, "contra_norm", scale=SCALE):
        expected = model(PROMPT, use_cache=False).logits
        first = model(PROMPT, use_cache=True)
        torch.testing.assert_close(first.logits, expected)  # an empty cache hides nothing
        for call in (
            lambda: model(PROMPT[:, :1], past_key_values=first.past_key_values),
            lambda: model.generate(PROMPT, **GREEDY),
            lambda: model.generate(PROMPT, cache_implementation="static", disable_compile=True, **GREEDY),
        ):
            with pytest.raises(RuntimeError, match="use_cache=False"):
                call()
        torch.testing.assert_close(model(PROMPT, use_cache=False).logits, expected)  # an error leaves nothing behind


def test_generation_of_an_encoder_decoder() -> None:
    model, begin = build("BartForConditionalGeneration"), torch.ones(2, 1, dtype=torch.long)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    given = {"input_ids": TOKENS * mask, "attention_mask": mask, "num_beams": 1}
    known = {"encoder_outputs": model.model.encoder(TOKENS * mask, mask), "attention_mask": mask}
    plain, _ = greedy(model, begin, **known)
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.decoder"):
        expected, _ = greedy(model, begin, **known)
        assert torch.equal(model.generate(**given, use_cache=False, **GREEDY), expected)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model.generate(**given, **GREEDY)
    assert not torch.equal(plain, expected)
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.encoder"):  # it runs once; the cache is not its own
        changed = model.generate(**given, **GREEDY)
        assert torch.equal(model.generate(**given, use_cache=False, **GREEDY), changed)


def test_packed_documents_are_refused() -> None:
    model, six = build("LlamaForCausalLM"), torch.arange(6)[None]
    uc.attach(model, "contra_norm", scale=SCALE)
    with pytest.raises(RuntimeError, match="packed"):
        model(six, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    model(six, position_ids=six, use_cache=False)
    mask, positions = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 2, 3]])
    model(six, attention_mask=mask, position_ids=positions, use_cache=False)  # as `generate` numbers tokens
