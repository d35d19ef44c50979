"""Models by name and data by file, for the command line; each library is imported only when it is needed."""

from uncollapse.loading.batches import Data, Wanted, data_for
from uncollapse.loading.errors import UsageError
from uncollapse.loading.models import Loaded, load
from uncollapse.loading.text import built_in_sentences

__all__ = ["Data", "Loaded", "UsageError", "Wanted", "built_in_sentences", "data_for", "load"]
