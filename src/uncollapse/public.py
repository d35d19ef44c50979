"""All that can be taken from the package: `import uncollapse as uc`, then `uc.diagnose`, `uc.ContraNorm`.

It is imported when the first of these names is asked for, see `uncollapse/__init__.py`.
"""

from typing import Any

from uncollapse import __version__, cures, losses, metrics, pairwise
from uncollapse.attachment.attach import Attachment, attach, attachments, detach, places
from uncollapse.attachment.inner_tokens import Tokens, tokens
from uncollapse.attachment.save import load_cure, save_cure
from uncollapse.cures import *  # noqa: F403
from uncollapse.diagnosis.embeddings import RowStatistics, diagnose_rows
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose, diagnose_activations
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.errors import did_you_mean
from uncollapse.losses import *  # noqa: F403
from uncollapse.metrics import *  # noqa: F403
from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Rule
from uncollapse.registry import CURES, LOSSES, METRICS
from uncollapse.tuning.tune_model import Tuned, tune


def __getattr__(name: str) -> Any:
    """Entries of the registries that no list below names: those of files that were added to the folders."""
    for registry in (METRICS, CURES, LOSSES):
        if name in registry:
            return registry[name].function
    for entry in CURES.values():
        if name == entry.layer.__name__:
            return entry.layer
    raise AttributeError(f"module 'uncollapse' has no attribute {name!r}.{did_you_mean(name, __all__)}")


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
    "RowStatistics",
    "Rule",
    "Tokens",
    "Tuned",
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
    "tune",
    *cures.__all__,
    *losses.__all__,
    *metrics.__all__,
]
