"""Find, mend and prove mended the collapse of representations in deep networks.

>>> import torch, uncollapse as uc
>>> x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
>>> bool((uc.mean_cosine(uc.contra_norm(x, 1.0)) < uc.mean_cosine(x)).all())
True
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from uncollapse.registry import RENDERERS, Later

if TYPE_CHECKING:
    from uncollapse.cures import *  # noqa: F403
    from uncollapse.losses import *  # noqa: F403
    from uncollapse.metrics import *  # noqa: F403
    from uncollapse.public import *  # noqa: F403

__version__ = "0.1.0"

RENDERERS.add("page", Later.imported("uncollapse.report", "write"))  # `diagnosis` does not import `report`
RENDERERS.add("plot", Later.imported("uncollapse.report", "plot"))


def __getattr__(name: str) -> Any:
    """A public name or a module, imported when it is first asked for: without them, the command line starts at once."""
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("__") and name != "__all__":  # which Python and its tools ask every module for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module(f"{__name__}.public")
    globals().update({known: getattr(public, known) for known in public.__all__})
    return getattr(public, name)


def __dir__() -> list[str]:
    """All public names, for editors."""
    return sorted({*globals(), *importlib.import_module(f"{__name__}.public").__all__})
