"""Whether uncollapse works on this machine: what is installed, what there is to compute on, and a few sums to check."""

from collections.abc import Iterator

from uncollapse.cli import health_installation, health_machine, health_self_check
from uncollapse.cli.health_findings import Finding

__all__ = ["Finding", "examine"]


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is made."""
    yield from health_installation._check_versions()
    yield from health_machine._check_devices()
    yield from health_installation._check_extras()
    yield from health_machine._check_folders()
    yield from health_self_check._run_self_checks()
