"""Where a cure goes if nothing else is asked for."""

from uncollapse.backbones.select import At, final_places, select_places
from uncollapse.backbones.sites import Stack
from uncollapse.registry import Cure


def places_of(stack: Stack, cure: Cure, at: At | None) -> tuple[str, ...]:
    """Return the places that `at` selects for a cure; None selects the cure's own."""
    fixed = {"attention": "attention.context", "edges": "edges"}.get(cure.acts_on)
    if fixed is not None:
        if at not in (None, fixed, [fixed], (fixed,)):
            raise ValueError(f"{cure.name} acts on {cure.acts_on}: its place is {fixed!r}, got at={at!r}.")
        return (fixed,)
    if at is None:
        known = (*stack.places(), *final_places(stack))
        return (next(place for place in (cure.place, "conv.output", "block") if place in known),)
    return select_places(stack, at, ends=True)
