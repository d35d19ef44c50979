"""A curve as small as a word, drawn without any script."""

import math
from collections.abc import Sequence

from uncollapse.report.markup import Markup, element

WIDTH, HEIGHT, ROOM = 120, 32, 3


def sparkline(values: Sequence[float], beside: Sequence[float], colour: str) -> Markup:
    """The values as a line, and others dashed beside it, as an SVG that a screen reader leaves out."""
    finite = [v for v in (*values, *beside) if math.isfinite(v)]
    low, high = min(finite), max(finite)
    lines = [
        element("path", d=_path(line, low, high), class_=name, vector_effect="non-scaling-stroke")
        for line, name in ((beside, "beside"), (values, "line"))
        if len(line) > 1
    ]
    return Markup(
        f'<svg class="sparkline {colour}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(lines)}</svg>"
    )


def _path(values: Sequence[float], low: float, high: float) -> str:
    """The points of a line from the left edge to the right; a gap where there is no number."""
    steps, pen = [], "M"
    for i, value in enumerate(values):
        if not math.isfinite(value):
            pen = "M"
            continue
        x = ROOM + (WIDTH - 2 * ROOM) * i / (len(values) - 1)
        y = HEIGHT - ROOM - (HEIGHT - 2 * ROOM) * (value - low) / ((high - low) or 1)
        steps.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(steps)
