"""Tracks: the layers of several diagnoses on one axis, and which of them match."""

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.result import Diagnosis, Layer

ENDS = ("embed", "final")  # what comes before the first block and after the last
LONGEST_LABEL = 8
PLACE_DASHES = ((2, 3), (8, 3, 2, 3), (12, 4), (4, 2, 1, 2))
RANDOM_DASH = (6, 4)


@dataclass(frozen=True)
class Track:
    """The layers of one place of one diagnosis, or of its baseline, in order.

    of: index of the diagnosis. x: position of each layer on the common axis. depth: 0 = first layer, 1 = last.
    dash: lengths of the strokes and gaps of its line; empty for a solid line.
    """

    of: int
    place: str
    baseline: bool
    dash: tuple[int, ...]
    layers: tuple[Layer, ...]
    x: tuple[int, ...]
    depth: tuple[float, ...]


def diagnosis_names(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the name of each diagnosis: its model's, numbered if several models have the same name."""
    total, seen = Counter(d.model for d in diagnoses), Counter[str]()
    found = []
    for d in diagnoses:
        seen[d.model] += 1
        found.append(f"{d.model} ({seen[d.model]})" if total[d.model] > 1 else d.model)
    return found


def main_place(d: Diagnosis) -> str:
    """Return the output of blocks, or the first place if that was not measured."""
    places = [layer.place for layer in d.layers]
    return OUTPUT if OUTPUT in places or not places else places[0]


def main_layers(d: Diagnosis, layers: Sequence[Layer] | None = None) -> tuple[Layer, ...]:
    """Return the layers of the main place, in the order of the model. layers: of the baseline, instead of the model."""
    main = main_place(d)
    return tuple(layer for layer in (d.layers if layers is None else layers) if layer.place == main)


def layer_name(layer: Layer) -> str:
    """Return the name of a layer, with its place unless that is the output of a block."""
    return layer.name if layer.place == OUTPUT else f"{layer.name} ({layer.place})"


def same_layers(diagnoses: Sequence[Diagnosis]) -> bool:
    """Return whether all have the same blocks by name, apart from what comes before the first and after the last."""
    return len({_block_names(d) for d in diagnoses}) == 1


def layer_axis(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the names of the layers along the common axis: all of them, or those of the deepest model."""
    if not same_layers(diagnoses):
        return [layer.name for layer in max((main_layers(d) for d in diagnoses), key=len)]
    present = {layer.name for d in diagnoses for layer in main_layers(d)}
    first, last = ([end] if end in present else [] for end in ENDS)
    return [*first, *_block_names(diagnoses[0]), *last]


def tick_label(name: str, number: int) -> str:
    """Return a short name for an axis: "3" for "block 3", and for a long name its number in the table."""
    block = re.fullmatch(r"block (\d+)", name)
    return block[1] if block else name if len(name) <= LONGEST_LABEL else f"#{number}"


def build_tracks(diagnoses: Sequence[Diagnosis]) -> list[Track]:
    """Return all tracks in drawing order: per diagnosis the baseline, other places, and the main one on top."""
    found = []
    for of, d in enumerate(diagnoses):
        main, at = main_place(d), _positions(d, diagnoses)
        found.append(_track(distinct_baselines(diagnoses)[of], main, at, of, RANDOM_DASH, baseline=True))
        for i, place in enumerate(other_places(diagnoses)):
            found.append(_track(d.layers, place, at, of, PLACE_DASHES[i % len(PLACE_DASHES)]))
        found.append(_track(d.layers, main, at, of, ()))
    return [track for track in found if track.layers]


def distinct_baselines(diagnoses: Sequence[Diagnosis]) -> list[tuple[Layer, ...]]:
    """Return the baseline of each diagnosis; empty if an earlier one has the same, such as one of the same model."""
    return [() if d.baseline in [e.baseline for e in diagnoses[:i]] else d.baseline for i, d in enumerate(diagnoses)]


def other_places(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the places other than the main one, in order of appearance."""
    found = [(main_place(d), dict.fromkeys(layer.place for layer in d.layers)) for d in diagnoses]
    return list(dict.fromkeys(place for main, places in found for place in places if place != main))


def match_layers(a: Diagnosis, b: Diagnosis) -> list[tuple[Layer, Layer]]:
    """Return pairs of layers of a and b: same name and place, or same relative depth if the blocks differ."""
    if same_layers([a, b]):
        there = {(layer.name, layer.place): layer for layer in b.layers}
        return [(layer, there[layer.name, layer.place]) for layer in a.layers if (layer.name, layer.place) in there]
    pairs: list[tuple[Layer, Layer]] = []
    for one in build_tracks([a]):
        for other in build_tracks([b]):
            if one.place == other.place and not one.baseline and not other.baseline:
                pairs += zip(_nearest_layers(one, other.depth), other.layers, strict=True)
    return pairs


def _block_names(d: Diagnosis) -> tuple[str, ...]:
    return tuple(layer.name for layer in main_layers(d) if layer.name not in ENDS)


def _positions(d: Diagnosis, diagnoses: Sequence[Diagnosis]) -> dict[str, int]:
    """Return the position of each layer of one diagnosis on the common axis: by name, or by index if blocks differ."""
    along, own = layer_axis(diagnoses), [layer.name for layer in main_layers(d)]
    if same_layers(diagnoses):
        place = {name: i for i, name in reversed(list(enumerate(along)))}
        return {name: place[name] for name in own}
    shift = int(along[:1] == ["embed"] and own[:1] != ["embed"])
    return {name: i + shift for i, name in enumerate(own)}


def _track(
    layers: Sequence[Layer], place: str, at: dict[str, int], of: int, dash: tuple[int, ...], *, baseline: bool = False
) -> Track:
    here = tuple(layer for layer in layers if layer.place == place and layer.name in at)
    number = {name: i for i, name in enumerate(at)}
    depth = tuple(number[layer.name] / max(len(at) - 1, 1) for layer in here)
    return Track(of, place, baseline, dash, here, tuple(at[layer.name] for layer in here), depth)


def _nearest_layers(track: Track, depths: Sequence[float]) -> list[Layer]:
    """Return the layer at each depth, the first of those that are equally near."""
    ordered = sorted(zip(track.depth, range(len(track.depth)), strict=True))
    found = []
    for depth in depths:
        at = bisect.bisect_left(ordered, (depth, 0))
        near = ordered[max(at - 1, 0) : at + 1]
        found.append(track.layers[min(near, key=lambda one: abs(one[0] - depth))[1]])
    return found
