"""Push files to a model repository on the HuggingFace hub, and pull them from there, through `huggingface_hub`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.download import cause

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # owner/name
CARD, SECOND_CARD = "README.md", "uncollapse.md"


def is_name(text: str) -> bool:
    """Return whether a text is the name of a repository, not of a folder that exists.

    >>> is_name("org/cure"), is_name("./cure"), is_name("a/b/c")
    (True, False, False)
    """
    return bool(NAME.fullmatch(text)) and not Path(text).exists()


def push(repo_id: str, contents: Mapping[str, bytes], card: str, *, private: bool, message: str) -> str:
    """Write files and a card into a repository, in one commit; create the repository if there is none.

    A card that the repository has already is never replaced: ours then becomes uncollapse.md.

    Returns:
        The address of the commit.
    """
    if not NAME.fullmatch(repo_id):
        raise UsageError(f"A repository on the hub is called owner/name, got {repo_id!r}.")
    hub: Any = import_optional("huggingface_hub", "hf")
    with _readable_errors(repo_id):
        api = hub.HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        where = SECOND_CARD if api.file_exists(repo_id, CARD) else CARD
        files = {**contents, where: card.encode()}
        changes = [hub.CommitOperationAdd(path, content) for path, content in files.items()]
        return str(api.create_commit(repo_id, changes, commit_message=message).commit_url)


def pull(repo_id: str, names: Sequence[str], revision: str | None = None) -> Path:
    """Download files of a repository into the hub's cache, and return their folder."""
    hub: Any = import_optional("huggingface_hub", "hf")
    with _readable_errors(repo_id):
        return Path(hub.HfApi().snapshot_download(repo_id, revision=revision, allow_patterns=list(names)))


@contextmanager
def _readable_errors(repo_id: str) -> Iterator[None]:
    """Raise a UsageError that says what to do for whatever the hub or the network refuses."""
    errors: Any = import_optional("huggingface_hub.errors", "hf")
    log_in = "log in with: hf auth login"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(f"{repo_id} is gated on the hub: accept its terms there, and {log_in}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UsageError(f"The hub does not show {repo_id}: check its name, or {log_in}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise UsageError(_unreachable(repo_id, error)) from error
    except errors.HfHubHTTPError as error:
        raise UsageError(f"The hub refused {repo_id} ({cause(error)}). You may have to {log_in}") from error
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):  # the hub's client
            raise
        raise UsageError(_unreachable(repo_id, error)) from error


def _unreachable(repo_id: str, error: Exception) -> str:
    return f"The hub cannot be reached ({cause(error)}), so nothing was read from or written to {repo_id}."
