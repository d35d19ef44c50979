"""Whether a repository of the HuggingFace hub can be asked for, found out without the hub's long retries."""

import re
from typing import Any

from uncollapse.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TIMEOUT = 10.0  # seconds


def answers_for(repo: str) -> bool:
    """True if the hub has the repository, False if it cannot be reached; UsageError if the hub refuses it."""
    if not NAME.fullmatch(repo):
        raise UsageError(f"There is no folder {repo}, and a hub has no such names.")
    import huggingface_hub
    from huggingface_hub import errors

    api: Any = huggingface_hub.HfApi()
    try:
        api.model_info(repo, timeout=TIMEOUT)
    except errors.GatedRepoError as error:
        raise UsageError(f"{repo} is on the hub, but not for everybody: accept its terms there and log in.") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"{repo} is no folder here and no public model on the hub; check the spelling.") from error
    except Exception:  # offline mode, no connection, a proxy that refuses: what is in the cache remains
        return False
    return True
