"""Where the blocks of transformers' models keep their tokens: one description a kind of block.

transformers writes each architecture out in full, so that dozens of classes have the same block under other names. A
block is recognised by the children that it uses and their order, not by its class: Mistral and Qwen2 are read as Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from uncollapse.backbones import arguments
from uncollapse.backbones.sites import OUTPUT, Site


@dataclass(frozen=True)
class Kind:
    """A kind of block: its children in the order in which its forward pass uses them, and its places.

    The paths of the places are relative to the block, "" is the block itself. values: the module that computes the
    values of its attention, in one tensor with queries and keys or alone.
    """

    uses: tuple[str, ...]
    places: Mapping[str, Site]
    values: str = ""


def _post_norm(projection: str, output: str, norm: str, mlp: str, mlp_norm: str) -> Mapping[str, Site]:
    """x → norm(x + attention(x)) → norm(y + mlp(y)). `output`: what the attention adds to the residual."""
    return {
        "attention.input": Site("", "input"),
        "attention.context": Site(projection, "input"),
        "attention.output": Site(output),
        "attention.residual": Site(norm, "input"),
        "attention.norm": Site(norm),
        "mlp.output": Site(mlp),
        "mlp.residual": Site(mlp_norm, "input"),
        "mlp.norm": Site(mlp_norm),
    }


def _pre_norm(norm: str, projection: str, output: str, mlp_norm: str, mlp: str) -> Mapping[str, Site]:
    """x → x + attention(norm(x)) → y + mlp(norm(y))."""
    return {
        "attention.input": Site("", "input"),
        "attention.norm.input": Site(norm, "input"),
        "attention.norm": Site(norm),
        "attention.context": Site(projection, "input"),
        "attention.output": Site(output),
        "attention.residual": Site(mlp_norm, "input", carried=True),
        "mlp.norm.input": Site(mlp_norm, "input"),
        "mlp.norm": Site(mlp_norm),
        "mlp.output": Site(mlp),
        "mlp.residual": Site(""),
    }


_BERT = _post_norm(
    "attention.output.dense",
    "attention.output.dropout",
    "attention.output.LayerNorm",
    "output.dropout",
    "output.LayerNorm",
)
_BART = _post_norm("self_attn.out_proj", "self_attn", "self_attn_layer_norm", "fc2", "final_layer_norm")

# The numbers of the places in the published code of ContraNorm; ALBERT's are its own.
NUMBERS: Mapping[int, str] = {
    1: "attention.input",
    2: "attention.context",
    3: "attention.output",
    4: "attention.norm",
    5: "mlp.output",
    6: "mlp.norm",
    7: "attention.residual",
    8: "mlp.residual",
}
ALBERT_NUMBERS: Mapping[int, str] = {
    1: "attention.input",
    2: "attention.context",
    3: "attention.output",
    4: "attention.residual",
    5: "attention.norm",
    6: "mlp.output",
    7: "mlp.residual",
    8: "mlp.norm",
}

KINDS = (
    Kind(("attention",), _BERT, "attention.self.value"),  # BERT, RoBERTa, ELECTRA
    Kind(("attention", "intermediate", "output"), _BERT, "attention.self.value_proj"),  # DeBERTa
    Kind(  # MPNet
        ("attention", "intermediate", "output"),
        _post_norm(
            "attention.attn.o", "attention.dropout", "attention.LayerNorm", "output.dropout", "output.LayerNorm"
        ),
        "attention.attn.v",
    ),
    Kind(  # ALBERT
        ("attention", "full_layer_layer_norm"),
        _post_norm(
            "attention.dense",
            "attention.output_dropout",
            "attention.LayerNorm",
            "ffn_output",
            "full_layer_layer_norm",
        ),
        "attention.value",
    ),
    Kind(  # DistilBERT
        ("attention", "sa_layer_norm", "ffn", "output_layer_norm"),
        _post_norm("attention.out_lin", "attention", "sa_layer_norm", "ffn", "output_layer_norm"),
        "attention.v_lin",
    ),
    Kind(
        ("self_attn", "self_attn_layer_norm", "activation_fn", "fc1", "fc2", "final_layer_norm"),
        _BART,
        "self_attn.v_proj",
    ),
    Kind(  # the decoder of BART
        (
            *("self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm"),
            *("activation_fn", "fc1", "fc2", "final_layer_norm"),
        ),
        _BART,
        "self_attn.v_proj",
    ),
    Kind(  # ModernBERT
        ("attn", "attn_norm", "mlp", "mlp_norm"),
        _pre_norm("attn_norm", "attn.Wo", "attn", "mlp_norm", "mlp"),
        "attn.Wqkv",
    ),
    Kind(  # ViT, DeiT
        ("layernorm_before", "attention", "layernorm_after", "mlp"),
        _pre_norm("layernorm_before", "attention.o_proj", "attention", "layernorm_after", "mlp"),
        "attention.v_proj",
    ),
    Kind(  # DINOv2: what the residual receives is scaled
        ("norm1", "attention", "layer_scale1", "norm2", "mlp", "layer_scale2"),
        _pre_norm("norm1", "attention.o_proj", "layer_scale1", "norm2", "layer_scale2"),
        "attention.v_proj",
    ),
    Kind(  # CLIP, SigLIP
        ("layer_norm1", "self_attn", "layer_norm2", "mlp"),
        _pre_norm("layer_norm1", "self_attn.out_proj", "self_attn", "layer_norm2", "mlp"),
        "self_attn.v_proj",
    ),
    Kind(  # GPT-2
        ("ln_1", "attn", "ln_2", "mlp"),
        _pre_norm("ln_1", "attn.c_proj", "attn", "ln_2", "mlp"),
        "attn.c_attn",
    ),
    Kind(  # Gemma 2 and 3: what the residual receives is normalised
        (
            *("input_layernorm", "self_attn", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
        ),
        _pre_norm(
            "input_layernorm",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "self_attn.v_proj",
    ),
    Kind(  # Llama, Mistral, Qwen2, Gemma
        ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        _pre_norm("input_layernorm", "self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp"),
        "self_attn.v_proj",
    ),
)


def places(block: nn.Module, path: str) -> dict[str, Site]:
    """The places of a block at `path` in the model. A block of no known kind has one: what leaves it."""
    found, kind = {OUTPUT: Site(path)}, kind_of(block)
    if kind is None:
        return found
    in_chunks = getattr(block, "chunk_size_feed_forward", 0) > 0  # the MLP then sees a few tokens at a time
    for name, site in kind.places.items():
        if not (in_chunks and name.startswith("mlp.")):
            found[name] = Site(f"{path}.{site.path}".rstrip("."), site.side, carried=site.carried)
    return found


def numbers(found: Mapping[str, Site], model_type: str) -> Mapping[int, str]:
    """The paper's numbers of the places of a block; it has them for the norms behind the residuals."""
    table = ALBERT_NUMBERS if model_type == "albert" else NUMBERS
    is_post_norm = "attention.norm" in found and "attention.norm.input" not in found
    return {number: place for number, place in table.items() if place in found} if is_post_norm else {}


def kind_of(block: nn.Module) -> Kind | None:
    """The kind of a block, if it is known."""
    uses, names = _acting(block), {name for name, _ in block.named_modules()}
    known = (k for k in KINDS if k.uses == uses and all(site.path in names for site in k.places.values()))
    return next(known, None)


def order_of_use(module: nn.Module) -> tuple[str, ...]:
    """The names of the children that the forward pass of a module uses itself, in the order of the first use."""
    return tuple(name for name in arguments.names_in_forward(module) if name in module._modules)


def _acting(block: nn.Module) -> tuple[str, ...]:
    """What acts on the tokens in a block's own forward pass: its children and scales, without dropout."""
    acting = (nn.Module, nn.Parameter, float)
    return tuple(
        n for n in arguments.names_in_forward(block) if "drop" not in n and isinstance(getattr(block, n, None), acting)
    )
