"""Measure the parts of all blocks on one batch: at their sites, by gradients of a loss, and by switching them off."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.backbones import forward
from uncollapse.backbones.introspection import argument_names
from uncollapse.backbones.read_hooks import SiteReader
from uncollapse.backbones.select import Selection
from uncollapse.backbones.sites import OUTPUT, Block, Site, Stack, sets_with_mask
from uncollapse.backbones.switches import Switchboard, branches
from uncollapse.diagnosis.parts import BlockParts, Change, Parts, Switch
from uncollapse.metrics import robust
from uncollapse.pairwise import numerics

Loss = Callable[[Any, Any], Tensor]  # what the model returned and the batch -> one number
Flip = Callable[[Switchboard], None]
Key = tuple[Site, int]  # a site and the number of its call
Receive = Callable[[SiteReader, Key, Tensor], None]

SETS, TOKENS = 4, 256  # sequences of the batch that are measured, and tokens of each
ROWS, FEATURES = 512, 128  # tokens and features in which the residual is looked for
CARRIED = 0.01  # share of the variance from which a block is said to have a residual; noise gives 1 in ROWS · FEATURES
AS_IT_IS = "nothing"
ERRORS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AssertionError)  # of a model that was changed
NO_SITE = "no place in the blocks is known, or it did not run"
NO_LOSS = "there is no loss: pass batches with labels, or in Python loss="


@dataclass(frozen=True)
class _Tokens:
    """The tokens at one place."""

    cosine: float
    rank_share: float
    length: float
    dim: int


class PartProbe:
    """Measures the parts of a model, which must be in inspection mode.

    Args:
        model: a model with this stack.
        stack: its blocks.
        selection: of which of them the parts are reported. Switches act on all.
        prefix: whether CLS, distillation and register tokens count.
        seed: of all sampling and noise.
        loss: what the model returned and the batch -> the loss; the model's own, or cross-entropy, if not given.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        selection: Selection,
        *,
        prefix: bool = False,
        seed: int = 0,
        loss: Loss | None = None,
    ) -> None:
        self.model, self.stack, self.selection = model, stack, selection
        self.prefix, self.seed, self.loss = prefix, seed, loss
        self.missing: dict[str, str] = {}
        self._call: forward.Call = forward.run
        self._batch: Any = None
        self._graphs: Tensor | None = None

    def measure(self, call: forward.Call, batch: Any, graphs: Tensor | None = None) -> Parts:
        """Return the parts. graphs: the graph of each node, where the model does not take it itself."""
        self._call, self._batch, self._graphs = call, batch, graphs
        found, value = self._look(self._sites())
        last = self._last(found)
        gradients, residuals = self._gradients(), self._residuals()
        blocks = tuple(
            self._block(number, found, residuals.get(number), gradients.get(self._output(number)))
            for number in self.selection.blocks
        )
        self._note_missing(blocks)
        first = found[self._output(last)]
        switches = [Switch(AS_IT_IS, first.cosine, first.rank_share, value)]
        switches += self._switches(last, residuals)
        return Parts(self.stack.blocks[last].name, blocks, tuple(switches), dict(self.missing))

    def _output(self, number: int) -> Key:
        block = self.stack.blocks[number]
        return block.places[OUTPUT], block.call

    def _input(self, number: int) -> Key | None:
        """Return the stream before a block: after the one before it, or what enters the first."""
        if number > 0:
            return self._output(number - 1)
        return None if self.stack.embed is None else (self.stack.embed, 0)

    def _sites(self) -> set[Site]:
        blocks = [self.stack.blocks[number] for number in self.selection.blocks]
        inner = {b.places[place] for b in blocks for _, *ends in _steps(b) for place in ends if place in b.places}
        streams = {self._output(number)[0] for number in range(len(self.stack.blocks))}
        return inner | streams | ({self.stack.embed} if self.stack.embed is not None else set())

    def _run(self, sites: Iterable[Site], receive: Receive, flip: Flip | None = None) -> Any:
        """Run the model on the batch with a switch, and read sites. ValueError if the switch changed nothing."""

        def read(site: Site, call: int, x: Tensor) -> None:
            receive(reader, (site, call), x)

        reader = SiteReader(self.model, self.stack, sites, read)
        reader.graphs = self._graphs
        table = Switchboard(self.model, self.stack, lambda: reader.context, self.seed)
        with table:
            if flip is not None:
                flip(table)
            with reader:  # after the switches, so that it reads what they changed
                output = self._call(self.model, self._batch)
        if flip is not None and table.acted == 0:
            raise ValueError(NO_SITE)
        return output

    def _look(self, sites: Iterable[Site], flip: Flip | None = None) -> tuple[dict[Key, _Tokens], float | None]:
        """Return the tokens at some sites, and the loss if there is one."""
        found: dict[Key, _Tokens] = {}

        def receive(reader: SiteReader, key: Key, x: Tensor) -> None:
            if x.layout == torch.strided:
                found[key] = self._summarize(*self._sets(reader, key[0], x))

        loss = self._loss_of(self._run(sites, receive, flip))
        return found, self._finite("loss", loss)

    def _sets(self, reader: SiteReader, site: Site, x: Tensor) -> tuple[Tensor, Tensor]:
        layout = self.stack.layout_at(site, x)
        sets, mask = sets_with_mask(x.detach(), layout, reader.context, prefix=self.prefix)
        sets = numerics.prepare_tokens(sets, mask)
        return sets, torch.ones(sets.shape[:2], dtype=torch.bool, device=sets.device) if mask is None else mask

    def _summarize(self, sets: Tensor, mask: Tensor) -> _Tokens:
        chosen = (mask.sum(-1) >= 3).nonzero()[:SETS, 0]
        sets, mask = sets[chosen], mask[chosen]
        positions = mask.any(0).nonzero()[:, 0]  # most may be padding in all of them
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(self.seed))[:TOKENS]
        positions = positions[order.sort().values.to(sets.device)]
        x, real = sets[:, positions], mask[:, positions]
        enough = real.sum(-1) >= 3
        if not bool(enough.any()):
            raise ValueError("no sequence has three tokens")
        x, real = x[enough], real[enough]
        length = float(x[real].double().square().mean().sqrt())
        cosine, share = (values.mean() for values in robust.cosine_and_rank_share(x, real))
        return _Tokens(float(cosine), float(share), length, x.shape[-1])

    def _last(self, found: Mapping[Key, _Tokens]) -> int:
        """Return the number of the last block; in a graph network that narrows to outputs, of the one before."""
        last = len(self.stack.blocks) - 1
        narrows = last > 2 and found[self._output(last)].dim < found[self._output(last - 1)].dim
        return last - 1 if self.stack.family == "pyg" and narrows else last

    def _block(
        self, number: int, found: Mapping[Key, _Tokens], residual: float | None, gradient: float | None
    ) -> BlockParts:
        block, changes = self.stack.blocks[number], dict[str, Change]()
        own: dict[str, Key | None] = {place: (site, block.call) for place, site in block.places.items()}
        own["input"] = self._input(number)
        for part, before, after in _steps(block):
            a, b = (found.get(key) if (key := own.get(place)) is not None else None for place in (before, after))
            if a is not None and b is not None:
                change = Change(b.cosine - a.cosine, b.rank_share - a.rank_share)
                changes[part] = change if part not in changes else changes[part].plus(change)
        return BlockParts(block.name, changes, residual, found[self._output(number)].length, gradient)

    def _loss_of(self, output: Any) -> Tensor | None:
        if self.loss is None:
            return own_loss(output, self._batch)
        value = self.loss(output, self._batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"loss must return a tensor with one number, got {type(value).__name__}.")
        return value.reshape(())

    def _finite(self, name: str, number: Tensor | None) -> float | None:
        """Return a number; None if there is none, and with a note if it is not finite, as without any label."""
        value = math.nan if number is None else float(number.detach())
        if number is not None and not math.isfinite(value):
            self.missing[name] = f"not finite, got {value}"
        return value if math.isfinite(value) else None

    def _gradients(self) -> dict[Key, float]:
        """Return the norm of the gradient of the loss after each block."""
        tensors: dict[Key, Tensor] = {}

        def receive(reader: SiteReader, key: Key, x: Tensor) -> None:
            if x.requires_grad:
                tensors[key] = x

        with torch.enable_grad():
            output = self._run({site for site, _ in self._outputs()}, receive)
            loss = self._loss_of(output)
            if loss is None or self._finite("loss", loss) is None or not loss.requires_grad or not tensors:
                unusable = "no weight requires a gradient" if "loss" not in self.missing else "the loss is not finite"
                self.missing["gradients"] = NO_LOSS if loss is None else unusable
                return {}
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        norms = (self._finite("gradients", None if g is None else g.double().norm()) for g in found)
        return {key: norm for key, norm in zip(tensors, norms, strict=True) if norm is not None}

    def _outputs(self) -> Iterator[Key]:
        return map(self._output, range(len(self.stack.blocks)))

    def _residuals(self) -> dict[int, float]:
        """Return the share of the variance after each block that its residual branch carries, 0 if there is none."""
        own = [block for block in self.stack.blocks if _adds_itself(self.model, block)]
        if own:
            self.missing["residual"] = "the convolutions add it themselves"
            return {}
        try:
            exists, share = self._correlate_with_earlier("stream"), self._correlate_with_earlier("branch")
        except ERRORS as error:
            self.missing["residual"] = _sentence(error)
            return {}
        return {number: share[number] if exists[number] >= CARRIED else 0.0 for number in exists}

    def _correlate_with_earlier(self, like: Any) -> dict[int, float]:
        """Return the largest squared correlation of each block's output with an earlier stream, if branches are noise.

        What a branch computes is replaced by noise, so that only what passes it correlates.
        """
        rows: dict[Key, Tensor] = {}

        def receive(reader: SiteReader, key: Key, x: Tensor) -> None:
            if x.layout == torch.strided:
                sets, mask = self._sets(reader, key[0], x)
                rows[key] = _sample(sets[mask])

        streams = [self._input(0), *self._outputs()]
        self._run({key[0] for key in streams if key is not None}, receive, partial(Switchboard.noise, like=like))
        found = {}
        for number, block in enumerate(self.stack.blocks):
            after = rows.get(self._output(number))
            earlier = [rows[key] for key in streams[: number + 1] if key is not None and key in rows]
            same = [x for x in earlier if after is not None and x.shape == after.shape]
            if after is not None and same and branches(block):
                found[number] = max(_squared_correlation(x, after) for x in same)
        return found

    def _switches(self, last: int, residuals: Mapping[int, float]) -> list[Switch]:
        """Return the last block with each switch that fits the model."""
        flips: dict[str, Flip] = {"no mixing": Switchboard.stop_mixing}
        if self.stack.family != "pyg":
            flips |= {"uniform attention": Switchboard.uniform_attention, "MLP off": Switchboard.stop_mlp}
        if residuals:
            has = 2 * sum(share > 0 for share in residuals.values()) > len(residuals)
            name = "residual doubled" if has else "residual added"
            flips[name] = Switchboard.double_residual if has else Switchboard.add_residual
        found, key = [], self._output(last)
        for name, flip in flips.items():
            try:
                tokens, loss = self._look([key[0]], flip)
                found.append(Switch(name, tokens[key].cosine, tokens[key].rank_share, loss))
            except ERRORS as error:
                self.missing[name] = _sentence(error)
        return found

    def _note_missing(self, blocks: tuple[BlockParts, ...]) -> None:
        parts = ("convolution",) if self.stack.family == "pyg" else ("attention", "mlp", "norm")
        for part in parts:
            if not any(part in block.changes for block in blocks):
                self.missing[Parts.label(part)] = NO_SITE
        if all(block.residual is None for block in blocks):
            self.missing.setdefault("residual", NO_SITE)


def own_loss(output: Any, batch: Any) -> Tensor | None:
    """Return the loss that a model returned, or the cross-entropy of its logits (n, classes) and the batch's labels.

    None if there is neither. Labels are "labels" or "label" of a mapping, the second of two elements, or `y` of a graph
    at its `train_mask`.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    labels, chosen = _labels(batch)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        return None
    return F.cross_entropy(logits, labels) if chosen is None else F.cross_entropy(logits[chosen], labels[chosen])


def _labels(batch: Any) -> tuple[Any, Any]:
    """Return the labels of a batch, and for which rows they count, None for all."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch.get("label")), None
    if isinstance(batch, tuple | list):
        return (batch[1] if len(batch) == 2 else None), None
    return getattr(batch, "y", None), getattr(batch, "train_mask", None)


def _steps(block: Block) -> Iterator[tuple[str, str, str]]:
    """Yield each part of a block, and the places before and after it."""
    places, stream = block.places, "input"
    post_norm = "attention.norm" in places and "attention.norm.input" not in places
    if "conv.output" in places:
        yield "convolution", stream, "conv.output"
        yield "rest", "conv.output", OUTPUT
    for part in ("attention", "cross", "mlp"):
        if f"{part}.residual" in places:
            yield part, stream, f"{part}.residual"
            stream = f"{part}.residual"
        if f"{part}.norm" in places:
            yield "norm", stream if post_norm else f"{part}.norm.input", f"{part}.norm"
            stream = f"{part}.norm" if post_norm else stream


def _adds_itself(model: nn.Module, block: Block) -> bool:
    """Return whether a graph convolution contains a residual, as that of GCNII does."""
    if "conv.output" not in block.places:
        return False
    conv = model.get_submodule(block.places["conv.output"].path)
    return "x_0" in argument_names(conv) or getattr(conv, "residual", False) is True


def _sample(rows: Tensor) -> Tensor:
    """Return some rows and features, evenly spaced, minus the mean of each feature, in float64."""
    n, d = rows.shape
    some = torch.linspace(0, n - 1, min(n, ROWS)).round().long().to(rows.device)
    features = torch.linspace(0, d - 1, min(d, FEATURES)).round().long().to(rows.device)
    x = rows[some][:, features].double()
    return x - x.mean(0)


def _squared_correlation(x: Tensor, y: Tensor) -> float:
    sizes = float(x.square().sum() * y.square().sum())
    return float((x * y).sum()) ** 2 / sizes if sizes > 0 else 0.0


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
