"""Cured models of transformers at work: generation, gradient checkpointing, the Trainer, models inside others."""

import copy
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import uncollapse as uc  # noqa: E402

SCALE = 0.6
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {
    **{"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": None, "attn_pdrop": 0.0},
}
BART = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None},
    **{"decoder_start_token_id": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", {**TEXT, **STILL}),
    "BertForSequenceClassification": ("BertConfig", {**TEXT, **STILL}),
    "AlbertModel": ("AlbertConfig", {**TEXT, **STILL}),
    "GPT2Model": ("GPT2Config", {**GPT2, **STILL}),
    "LlamaModel": ("LlamaConfig", DECODER),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "Gemma2ForCausalLM": ("Gemma2Config", {**DECODER, "sliding_window": 4}),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "T5Model": ("T5Config", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}),
    "CLIPModel": ("CLIPConfig", {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE}),
}


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    model: Any = getattr(transformers, name)(getattr(transformers, kind)(**{**config, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def padded(seed: int, *lengths: int) -> dict[str, Tensor]:
    """Sequences of these lengths, with padding behind them."""
    mask = torch.tensor([[int(i < n) for i in range(max(lengths))] for n in lengths])
    tokens = torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens * mask, "attention_mask": mask}


GENERATORS = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM")
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@torch.no_grad()
def greedy(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A loop of full forward passes: the tokens, and the logits of each step."""
    steps = []
    for _ in range(GREEDY["max_new_tokens"]):
        steps.append(model(tokens, use_cache=False).logits[:, -1])
        tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(steps)


def generated(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Likewise, by the library."""
    found = model.generate(**given, **GREEDY, output_logits=True, return_dict_in_generate=True)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("place", ["attention.residual", "block", "attention.input"])
@pytest.mark.parametrize("name", GENERATORS)
def test_generation_without_a_cache_is_a_loop_of_full_passes(name: str, place: str) -> None:
    model, tokens = build(name, torch.float32), padded(1, 5)["input_ids"]
    plain, plain_logits = greedy(model, tokens)
    with uc.attach(model, "contra_norm", scale=SCALE, at=place):
        expected, logits = greedy(model, tokens)
        alone, alone_logits = generated(model, input_ids=tokens, use_cache=False)
        left = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], 1)
        batch = {"input_ids": torch.cat([left, padded(2, 8)["input_ids"]]), "attention_mask": torch.ones(2, 8).long()}
        batch["attention_mask"][0, :3] = 0
        beside, beside_logits = generated(model, **batch, use_cache=False)
    assert (logits[0] - plain_logits[0]).abs().max() > 1e-2
    assert torch.equal(alone, expected)
    assert torch.equal(beside[:1, 3:], expected)
    torch.testing.assert_close(alone_logits, logits, rtol=0, atol=1e-3)
    torch.testing.assert_close(beside_logits[:, :1], logits, rtol=0, atol=1e-3)
    assert torch.equal(generated(model, input_ids=tokens)[0], plain)  # with a cache again


@pytest.mark.parametrize("name", GENERATORS)
def test_a_cache_is_refused_once_it_holds_tokens(name: str) -> None:
    model, tokens = build(name, torch.float32), padded(1, 5)["input_ids"]
    with uc.attach(model, "contra_norm", scale=SCALE):
        expected = model(tokens, use_cache=False).logits
        first = model(tokens, use_cache=True)
        torch.testing.assert_close(first.logits, expected)  # an empty cache hides nothing
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model(tokens[:, :1], past_key_values=first.past_key_values)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model.generate(tokens, **GREEDY)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model.generate(tokens, cache_implementation="static", disable_compile=True, **GREEDY)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)  # an error leaves nothing behind


def test_generation_of_an_encoder_decoder() -> None:
    model, given = build("BartForConditionalGeneration", torch.float32), padded(1, 7, 5)
    encoded = model.model.encoder(**given)

    def loop() -> Tensor:
        tokens = torch.ones(2, 1, dtype=torch.long)
        for _ in range(GREEDY["max_new_tokens"]):
            mask = given["attention_mask"]
            logits = model(
                encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=tokens, use_cache=False
            ).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens

    plain = loop()
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.decoder"):
        expected = loop()
        assert torch.equal(model.generate(**given, use_cache=False, num_beams=1, **GREEDY), expected)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            model.generate(**given, num_beams=1, **GREEDY)
    assert not torch.equal(plain, expected)
    with uc.attach(model, "contra_norm", scale=SCALE, part="model.encoder"):  # it runs once; the cache is not its own
        changed = model.generate(**given, num_beams=1, **GREEDY)
        assert torch.equal(model.generate(**given, num_beams=1, use_cache=False, **GREEDY), changed)


CURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("contra_norm", {"learnable": True, "scale": SCALE, "at": ("attention.residual", "block")}),
    ("contra_norm", {"learnable": True, "scale": SCALE, "at": "attention.input"}),
    ("feat_scale", {"at": "attention.output"}),
    ("attn_scale", {}),
)


def loss_and_gradients(model: Any, *batches: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of all batches together: their passes run before the one backward pass."""
    model.zero_grad()
    outputs = [model(**batch).last_hidden_state[batch["attention_mask"].bool()] for batch in batches]
    loss = torch.stack([output.pow(3).mean() for output in outputs]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(("cure", "options"), CURES, ids=[f"{c}-{o.get('at', '')}" for c, o in CURES])
@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "LlamaModel"])
def test_checkpointing_gives_the_same_gradients(name: str, cure: str, options: dict[str, Any], reentrant: bool) -> None:
    """Two batches with other padding pass before one backward pass, which runs the blocks of both again."""
    if name == "LlamaModel":
        options = {**options, "at": "final.norm"} if options.get("at") == "attention.input" else options
    model, batches = build(name).train(), (padded(1, 7, 3, 5), padded(2, 4, 6, 9))
    plain, _ = loss_and_gradients(model, *batches)
    attachment = uc.attach(model, cure, **options)
    for module in attachment.cures.values():
        for parameter in module.parameters():
            parameter.data.copy_(torch.linspace(-0.4, 0.8, parameter.numel()))
    loss, gradients = loss_and_gradients(model, *batches)
    runs: list[str] = []
    counting = next(m for n, m in model.named_modules() if n.endswith((".query", ".q_proj", ".c_attn")))
    counting.register_forward_hook(lambda *_: runs.append("run"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, regained = loss_and_gradients(model, *batches)
    assert len(runs) == 2 * 2  # both batches, forward and again
    assert abs(loss - plain) > 1e-4
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-10)
    assert set(regained) == set(gradients)
    assert any("uncollapse" in n and g.abs().max() > 1e-6 for n, g in gradients.items())
    for key, gradient in gradients.items():
        torch.testing.assert_close(regained[key], gradient, rtol=1e-4, atol=1e-7, msg=key)


def checkpointed(group: Any, *args: Any, **kwargs: Any) -> Any:
    """The library does not checkpoint ALBERT; people do it themselves."""
    inner = functools.partial(type(group).forward, group, **kwargs)
    return torch.utils.checkpoint.checkpoint(inner, *args, use_reentrant=False)


def test_passes_of_albert_that_are_run_again() -> None:
    """All passes: the same gradients. Some: which pass it is that is run again is not known, so that is an error."""
    model, batches = build("AlbertModel").train(), (padded(1, 7, 3), padded(2, 4, 6))
    attachment = uc.attach(model, "contra_norm", scale=SCALE, learnable=True)
    _, gradients = loss_and_gradients(model, *batches)
    group = model.encoder.albert_layer_groups[0]
    group.forward = types.MethodType(checkpointed, group)
    _, regained = loss_and_gradients(model, *batches)
    for key, gradient in gradients.items():
        torch.testing.assert_close(regained[key], gradient, rtol=1e-6, atol=1e-10, msg=key)
    attachment.remove()
    uc.attach(model, "contra_norm", scale=SCALE, layers=[1])
    with pytest.raises(RuntimeError, match="Switch checkpointing off"):
        loss_and_gradients(model, *batches)


def train(where: Path, model: Any, resume: str | None = None) -> Any:
    pytest.importorskip("accelerate")
    rows = [{**{k: v[0] for k, v in padded(i, 6).items()}, "labels": i % 2} for i in range(12)]
    for i, row in enumerate(rows):
        row["attention_mask"] = (torch.arange(6) < 3 + i % 4).long()
    arguments = transformers.TrainingArguments(
        output_dir=str(where),
        max_steps=3,
        save_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_a_training_that_is_resumed_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def fresh() -> Any:
        model = build("BertForSequenceClassification", torch.float32, hidden_dropout_prob=0.1)
        uc.attach(model, "contra_norm", scale=0.3, learnable=True)
        return model

    begun = {n: p.clone() for n, p in fresh().named_parameters() if "uncollapse" in n}
    whole = train(tmp_path / "whole", fresh())
    own = {n: p for n, p in whole.named_parameters() if "uncollapse" in n}
    assert len(own) == len(begun) == 2
    assert all((own[n] - p).abs().min() > 0 for n, p in begun.items())
    resumed = train(tmp_path / "resumed", fresh(), str(tmp_path / "whole" / "checkpoint-1"))
    for (n, p), (_, q) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=n)


def blocks_cured_at_their_end(blocks: Any, mask: Tensor | None, causal: bool = False) -> None:
    """The formula behind each block, without hooks: in blocks that return a tensor or a tuple."""

    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        output = type(block).forward(block, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        first = uc.contra_norm(first, SCALE, mask=mask, causal=causal)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    for block in blocks:
        block.forward = types.MethodType(forward, block)


class Own(nn.Module):
    """A user's module around a model of the library, which calls it by position."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 2, dtype=torch.float64)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(tokens, mask).last_hidden_state)
        return logits


def check(model: nn.Module, reference: nn.Module, run: Any, real: Any = slice(None), **where: Any) -> None:
    """Whether a cure at the end of each block gives what the reference gives, and something new."""
    with torch.no_grad():
        plain, expected = run(model), run(reference)
        with uc.attach(model, "contra_norm", scale=SCALE, at="block", tokens="all", **where):
            cured = run(model)
        assert (cured - plain)[real].abs().max() > 1e-3
        torch.testing.assert_close(cured[real], expected[real], rtol=0, atol=1e-5)
        assert torch.equal(run(model), plain)


def test_a_model_with_a_head_and_a_model_in_a_users_module() -> None:
    given = padded(1, 7, 4)
    mask = given["attention_mask"].bool()
    model = build("BertForSequenceClassification")
    reference = copy.deepcopy(model)
    blocks_cured_at_their_end(reference.bert.encoder.layer, mask)
    check(model, reference, lambda m: m(**given).logits)
    own = Own(build("BertModel"))
    other = copy.deepcopy(own)
    blocks_cured_at_their_end(other.encoder.encoder.layer, mask)
    check(own, other, lambda m: m(*given.values()), mask)


@pytest.mark.parametrize("part", ["vision_model", "text_model"])
def test_one_tower_of_clip(part: str) -> None:
    model, given = build("CLIPModel"), padded(1, 7, 4)
    given["pixel_values"] = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    mask = given["attention_mask"].bool() if part == "text_model" else None
    blocks_cured_at_their_end(getattr(reference, part).encoder.layers, mask, causal=part == "text_model")
    own, other = ("image_embeds", "text_embeds")[:: 1 if part == "vision_model" else -1]
    check(model, reference, lambda m: m(**given)[own], part=part)
    with torch.no_grad(), uc.attach(model, "contra_norm", scale=SCALE, part=part):
        cured = model(**given)[other]
    torch.testing.assert_close(cured, reference(**given)[other], rtol=0, atol=0)  # the other tower is as it was


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_the_end_of_blocks_of_t5(part: str) -> None:
    model, given, other = build("T5Model"), padded(1, 7, 4), padded(2, 5, 6)
    given = {**given, **{f"decoder_{name}": value for name, value in other.items()}}
    reference = copy.deepcopy(model)
    mask = (given if part == "encoder" else other)["attention_mask"].bool()
    blocks_cured_at_their_end(getattr(reference, part).block, mask, causal=part == "decoder")
    key = "encoder_last_hidden_state" if part == "encoder" else "last_hidden_state"
    check(model, reference, lambda m: m(**given)[key], mask, part=part)
    with pytest.raises(ValueError, match=r"has no place 'attention\.residual'"):
        uc.attach(model, "contra_norm", scale=SCALE, at="attention.residual", part=part)


def test_a_copy_of_a_cured_model_has_its_own_cure() -> None:
    model, given = build("LlamaModel"), padded(1, 7, 4)
    uc.attach(model, "contra_norm", scale=SCALE, learnable=True)
    run = functools.partial(lambda m: m(**given).last_hidden_state.detach())
    copied, before = copy.deepcopy(model), run(model)
    for name, parameter in model.named_parameters():
        if "uncollapse" in name:
            parameter.data.zero_()
    assert torch.equal(run(copied), before)
    assert (run(model) - before).abs().max() > 1e-3
    uc.detach(copied)
    torch.testing.assert_close(run(copied), run(model), rtol=0, atol=1e-5)  # of which nothing is left but scales of 0
