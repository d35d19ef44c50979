"""What was probably meant, where a name is unknown."""

import difflib
from collections.abc import Iterable

SHORT = 3  # letters that a part of a name has at least, to stand for it


def did_you_mean(name: object, names: Iterable[object], most: int = 1) -> str:
    """A question with the names that are closest, to be put behind a sentence; nothing where none is close.

    Args:
        name: what was asked for.
        names: those there are.
        most: how many are named at most.

    >>> did_you_mean("contranorm", ["pair_norm", "contra_norm"])
    " Did you mean 'contra_norm'?"
    >>> did_you_mean("Rank", ["mean_cosine", "effective_rank"])
    " Did you mean 'effective_rank'?"
    >>> did_you_mean("xyzzy", ["pair_norm", "contra_norm"])
    ''
    """
    there = {_plain(known): str(known) for known in names}
    asked = _plain(name)
    close = difflib.get_close_matches(asked, there, n=most)
    if not close and len(asked) >= SHORT:
        close = [known for known in there if asked in known][:most]
    return f" Did you mean {' or '.join(repr(there[known]) for known in close)}?" if close else ""


def _plain(name: object) -> str:
    """Without what is easily mistaken: capitals, and dashes for underscores."""
    return str(name).lower().replace("-", "_")
