"""Whether uncollapse works on this machine: what is installed, what there is to compute on, and a few sums to check."""

from collections.abc import Iterator

from uncollapse.health import installation, machine, self_check
from uncollapse.health.findings import Finding

__all__ = ["Finding", "examine"]


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is made."""
    yield from installation.versions()
    yield from machine.devices()
    yield from installation.parts()
    yield from machine.places()
    yield from self_check.checks()
