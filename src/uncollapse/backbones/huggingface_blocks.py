"""The blocks of transformers models: where they are, the modules around them, and the places of each kind of block.

transformers writes each architecture out in full, so that dozens of classes have the same block under different names.
A kind of block is recognized by the children that its forward pass uses, in their order. Nothing of transformers is
imported.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import nn

from uncollapse.backbones import introspection
from uncollapse.backbones.sites import OUTPUT, Site


@dataclass(frozen=True)
class Run:
    """Blocks that run one after the other: the path of what holds them, and path and call of each, in order.

    in_stages: several lists hold them, and the number of tokens and features may differ.
    """

    path: str
    blocks: tuple[tuple[str, int], ...]
    in_stages: bool = False


def find_runs(model: nn.Module) -> list[Run]:
    """Return all lists of blocks inside transformers models: those with attention, or else others, as of Mamba."""
    return _join_stages(_lists(model, _have_attention) or _lists(model, _are_layers))


def _lists(model: nn.Module, fits: Callable[[nn.ModuleList], bool]) -> list[Run]:
    """Return the lists of blocks of one kind."""
    found: dict[int, Run] = {}  # by the list itself: a user's module may hold one under a second name
    for path, module in model.named_modules(remove_duplicate=False):
        known = id(module) in found or any(lies_within(path, run.path) for run in found.values())
        if known or not any(has_base(m, "PreTrainedModel") for _, m in ancestors(model, path)):
            continue
        if has_base(module, "AlbertTransformer"):
            found[id(module)] = Run(path, _albert_passes(module, path))
        elif isinstance(module, nn.ModuleList) and _are_blocks(module, fits) and not _past_hooks(model, path):
            found[id(module)] = Run(path, tuple((f"{path}.{i}", 0) for i in range(len(module))))
    return list(found.values())


def _join_stages(runs: list[Run]) -> list[Run]:
    """Join lists whose names differ only in numbers, which are the stages of one model, as in Swin."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(re.sub(r"\d+", "*", run.path), []).append(run)
    return [
        stages[0] if len(stages) == 1 else Run(_around(stages), tuple(b for run in stages for b in run.blocks), True)
        for stages in groups.values()
    ]


def _around(runs: list[Run]) -> str:
    """Return the path of the module around several lists."""
    split = [run.path.split(".") for run in runs]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*split, strict=False))
    return ".".join(names[0] for names in shared)


def _past_hooks(model: nn.Module, path: str) -> bool:
    """Return whether blocks are run by `forward` itself, without hooks, as in SqueezeBERT: nothing can be read then."""
    holder = next(module for _, module in ancestors(model, path))
    return "forward" in introspection.code_names(holder)


def _are_blocks(modules: nn.ModuleList, fits: Callable[[nn.ModuleList], bool]) -> bool:
    """Return whether the modules have one class and fit, and none holds blocks (stages) or a model."""
    if len({type(m) for m in modules}) > 1 and not all(has_base(m, "GradientCheckpointingLayer") for m in modules):
        return False
    inner = [m for block in modules for m in block.modules()]
    if any(has_base(m, "PreTrainedModel") or (isinstance(m, nn.ModuleList) and _are_blocks(m, fits)) for m in inner):
        return False
    theirs = not any(type(m).__module__.startswith("torch.") for m in modules)  # those have a backbone of their own
    return theirs and fits(modules)


def _have_attention(modules: nn.ModuleList) -> bool:
    """Return whether some of the modules have attention."""
    return any("Attention" in type(m).__name__ for block in modules for m in block.modules())


def _are_layers(modules: nn.ModuleList) -> bool:
    """Return whether transformers calls all of them layers of a model, as in Mamba and RWKV; not for images."""
    around = [m for m in modules.modules() if has_base(m, "GradientCheckpointingLayer")]
    convolves = any(isinstance(m, nn.Conv2d | nn.Conv3d) for m in modules.modules())
    return len(modules) > 1 and all(m in around for m in modules) and not convolves


def _albert_passes(transformer: Any, path: str) -> tuple[tuple[str, int], ...]:
    """Return the passes of ALBERT: groups one after the other, each several times, all its layers each time."""
    layers, groups = transformer.config.num_hidden_layers, transformer.config.num_hidden_groups
    calls: Counter[str] = Counter()
    passes = []
    for i in range(layers):
        group = int(i / (layers / groups))  # as the model computes it
        for j in range(len(transformer.albert_layer_groups[group].albert_layers)):
            block = f"{path}.albert_layer_groups.{group}.albert_layers.{j}"
            passes.append((block, calls[block]))
            calls[block] += 1
    return tuple(passes)


def entry_path(model: nn.Module, run: Run, others: list[Run]) -> str:
    """Return the path of the module that gets the user's input and runs only these blocks, or else of their holder."""
    for path, module in ancestors(model, run.path):
        if takes_input(module):
            if not any(other is not run and lies_within(other.path, path) for other in others):
                return path
            break
    return next(path for path, module in ancestors(model, run.path) if not isinstance(module, nn.ModuleList))


def takes_input(module: nn.Module) -> bool:
    """Return whether a module is a model that takes token ids, pixels or audio, and with them the user's mask."""
    return has_base(module, "PreTrainedModel") and str(module.main_input_name) in introspection.argument_names(module)


def ancestors(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules around the one at `path`, innermost first, with their paths."""
    while path:
        path = path.rpartition(".")[0]
        yield path, model.get_submodule(path)


def pretrained_ancestors(model: nn.Module, path: str) -> list[tuple[str, Any]]:
    """Return the transformers models around the module at `path`, innermost first."""
    return [(name, module) for name, module in ancestors(model, path) if has_base(module, "PreTrainedModel")]


def lies_within(path: str, outer: str) -> bool:
    """Return whether `path` is inside the module at `outer`."""
    return not outer or path.startswith(f"{outer}.")


def has_base(module: nn.Module, name: str) -> bool:
    """Return whether a transformers class of this name is among the module's base classes."""
    return any(c.__name__ == name and c.__module__.startswith("transformers.") for c in type(module).__mro__)


@dataclass(frozen=True)
class Kind:
    """A kind of block: its children in the order in which its forward pass uses them, and its places.

    Paths of places are relative to the block; "" is the block itself. values: the module that computes the values of
    its attention, alone or in one tensor with queries and keys. maps: the module that returns the attention map if the
    config asks for it, of models that do not say where theirs are.
    """

    uses: tuple[str, ...]
    places: Mapping[str, Site]
    values: str = ""
    maps: str = ""


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
        "attention.attn",
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
    """Return the places of a block at `path` in the model. A block of an unknown kind has one: its output."""
    found, kind = {OUTPUT: Site(path)}, kind_of(block)
    if kind is None:
        return found
    in_chunks = getattr(block, "chunk_size_feed_forward", 0) > 0  # the MLP then sees a few tokens at a time
    for name, site in kind.places.items():
        if not (in_chunks and name.startswith("mlp.")):
            found[name] = Site(f"{path}.{site.path}".rstrip("."), site.side, carried=site.carried)
    return found


def numbers(found: Mapping[str, Site], model_type: str) -> Mapping[int, str]:
    """Return the paper's numbers of the places of a block; they exist for blocks with post-norm."""
    table = ALBERT_NUMBERS if model_type == "albert" else NUMBERS
    is_post_norm = "attention.norm" in found and "attention.norm.input" not in found
    return {number: place for number, place in table.items() if place in found} if is_post_norm else {}


def kind_of(block: nn.Module) -> Kind | None:
    """Return the kind of a block, if it is known."""
    uses, names = _parts_in_use(block), {name for name, _ in block.named_modules()}
    known = (k for k in KINDS if k.uses == uses and all(site.path in names for site in k.places.values()))
    return next(known, None)


def order_of_use(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the children that a module's own forward pass uses, in the order of their first use."""
    return tuple(name for name in introspection.code_names(module) if name in module._modules)


def _parts_in_use(block: nn.Module) -> tuple[str, ...]:
    """Return what acts on the tokens in a block's own forward pass: children and scales, without dropout."""
    acting = (nn.Module, nn.Parameter, float)
    return tuple(
        n for n in introspection.code_names(block) if "drop" not in n and isinstance(getattr(block, n, None), acting)
    )
