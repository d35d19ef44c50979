"""Find, mend and prove mended the collapse of representations in deep networks.

>>> import torch, uncollapse as uc
>>> x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
>>> bool((uc.mean_cosine(uc.contra_norm(x, 1.0)) < uc.mean_cosine(x)).all())
True
"""

from typing import Any

from uncollapse import cures, losses, metrics, pairwise
from uncollapse.attachment import Attachment, attach, attachments, detach, places
from uncollapse.cure_files import load_cure, save_cure
from uncollapse.cures import *  # noqa: F403
from uncollapse.diagnosing import diagnose, diagnose_activations, diagnose_rows
from uncollapse.diagnosis import Diagnosis
from uncollapse.inner import Tokens, tokens
from uncollapse.losses import *  # noqa: F403
from uncollapse.metrics import *  # noqa: F403
from uncollapse.moments import Moments
from uncollapse.monitor import CollapseWarning, Monitor, Rule
from uncollapse.registry import CURES, LOSSES, METRICS
from uncollapse.reservoir import Reservoir

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Entries of the registries that no list below names: those of files that were added to the folders."""
    for registry in (METRICS, CURES, LOSSES):
        if name in registry:
            return registry[name].function
    for entry in CURES.values():
        if name == entry.layer.__name__:
            return entry.layer
    raise AttributeError(f"module 'uncollapse' has no attribute {name!r}")


__all__ = [
    "CURES",
    "LOSSES",
    "METRICS",
    "Attachment",
    "CollapseWarning",
    "Diagnosis",
    "Moments",
    "Monitor",
    "Reservoir",
    "Rule",
    "Tokens",
    "__version__",
    "attach",
    "attachments",
    "cures",
    "detach",
    "diagnose",
    "diagnose_activations",
    "diagnose_rows",
    "load_cure",
    "losses",
    "metrics",
    "pairwise",
    "places",
    "save_cure",
    "tokens",
    *cures.__all__,
    *losses.__all__,
    *metrics.__all__,
]
