"""Find what a diagnosis measures, the layers and places of a model; all of it is checked before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from uncollapse import backbones
from uncollapse.backbones import forward
from uncollapse.backbones.select import At, Layers, Selection, TokenChoice, check_tokens, select_layers, select_places
from uncollapse.backbones.sites import OUTPUT, Layout, Stack
from uncollapse.diagnosis.capture import Capture
from uncollapse.diagnosis.layer_stats import StatsConfig


@dataclass(frozen=True)
class Plan:
    """How a diagnosis samples.

    baseline: number of batches on which a randomly initialized copy of the architecture is measured for comparison; 0
    for none. rank_samples: number of sequences per batch whose rank is measured, at least eight in the first batch.
    embed: whether to measure the input of the first block, which is slow for graphs with thousands of features. seed:
    seed of all sampling.
    """

    baseline: int = 1
    rank_samples: int = 2
    embed: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.baseline < 0:
            raise ValueError(f"baseline must be a number of batches, or 0 for no baseline, got {self.baseline}.")
        if self.rank_samples < 1:
            raise ValueError(f"rank_samples must be at least 1, got {self.rank_samples}.")


@dataclass(frozen=True)
class Target:
    """What will be measured, all of it checked: the layers and places of a model, and how.

    modules: the names or patterns of the layers, if the user gave them. part: the name of the part that has the
    stack, "" if the model has one stack. others: the other parts, which are measured in the same passes.
    """

    model: nn.Module
    stack: Stack
    selection: Selection
    places: tuple[str, ...]
    config: StatsConfig
    plan: Plan
    modules: tuple[str, ...] = ()
    part: str = ""
    others: tuple["Target", ...] = ()

    @property
    def partial(self) -> bool:
        """Whether some blocks of the model are left out."""
        return len(self.selection.blocks) < len(self.stack.blocks)

    def capture(self, model: nn.Module, seed: int) -> Capture:
        """Return hooks for a model of this architecture."""
        return Capture(model, self.stack, self.selection, self.places, replace(self.config, seed=seed))


def find_target(
    model: nn.Module,
    *,
    layers: Layers | None = None,
    at: At = OUTPUT,
    modules: str | Sequence[str] | None = None,
    part: str | None = None,
    tokens: TokenChoice = "patches",
    layout: Layout | None = None,
    attention: bool = False,
    plan: Plan = Plan(),
) -> Target:
    """Return what `diagnose` with these arguments measures. ValueError if something does not fit the model."""
    check_tokens(tokens)
    forward.check_model(model)
    model = forward.unwrap_compiled(model)
    modules = (modules,) if isinstance(modules, str) else tuple(modules or ())
    stacks = backbones.find_all(model, modules=modules or None, part=part, layout=layout)
    if layers is not None or at not in (OUTPUT, [OUTPUT], (OUTPUT,)):  # parts have layers and places of their own
        stacks = (backbones.find(model, modules=modules or None, part=part, layout=layout),)
    with_maps = [any(block.attention for block in stack.blocks) for stack in stacks]
    if attention and not any(with_maps):
        raise ValueError(f"{stacks[0].architecture} has no attention maps that can be read; leave out attention.")
    names = backbones.part_names(stacks) if len(stacks) > 1 else [""]
    config = StatsConfig(plan.rank_samples, attention, tokens == "all", seed=plan.seed)
    targets = []
    for stack, name, maps in zip(stacks, names, with_maps, strict=True):
        selection = select_layers(stack, layers)
        selection = replace(selection, embed=selection.embed and plan.embed)
        if not selection.blocks and not selection.embed:
            raise ValueError(f'layers must include a block or "embed", on which the verdict is based, got {layers!r}.')
        if attention and len(stacks) == 1 and not any(stack.blocks[n].attention for n in selection.blocks):
            raise ValueError(f"{stack.architecture} has no attention maps in these layers; leave out attention.")
        places = tuple(dict.fromkeys((OUTPUT, *select_places(stack, at))))
        own = replace(config, attention=attention and maps)
        targets.append(Target(model, stack, selection, places, own, plan, modules, name))
    return replace(targets[0], others=tuple(targets[1:]))
