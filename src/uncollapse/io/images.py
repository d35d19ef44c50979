"""Pictures -> batches."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.decoding import ENDINGS, UnreadableError, decoded

CROP, STEP = 224, 56  # side of a crop of the built-in photographs, and from one to the next


def image_files(folder: Path) -> list[Path]:
    """All files under a folder whose names end as those of images do, sorted."""
    found = sorted(
        Path(place) / name
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in ENDINGS
    )
    if not found:
        raise UsageError(f"{folder} holds no image files: their names end in {', '.join(sorted(ENDINGS))}.")
    return found


def opened(paths: Sequence[Path], unreadable: list[Path]) -> Iterator[Any]:
    """The pictures of the files in colour; those that cannot be read are added to `unreadable`."""
    for path in paths:
        try:
            with path.open("rb") as file:
                picture = decoded(file, str(path))
        except (UnreadableError, OSError):
            unreadable.append(path)
        else:
            yield picture
    if len(unreadable) == len(paths):
        raise UsageError(f"None of the {len(paths)} image files can be read, such as {paths[0]}.")


def built_in_crops() -> list[Any]:
    """Overlapping crops of scikit-learn's two photographs, first of one, then of the other, in turns."""
    datasets: Any = import_optional("sklearn.datasets", "data")
    image: Any = import_optional("PIL.Image", "data")
    photographs = [image.fromarray(array) for array in datasets.load_sample_images().images]
    width, height = photographs[0].size
    corners = [(x, y) for y in range(0, height - CROP + 1, STEP) for x in range(0, width - CROP + 1, STEP)]
    return [photo.crop((x, y, x + CROP, y + CROP)) for x, y in corners for photo in photographs]


def batches(pictures: Iterator[Any], read: Callable[[Sequence[Any]], Any], batch_size: int) -> Iterator[Any]:
    """What `read` makes of so many pictures at a time."""
    gathered: list[Any] = []
    for picture in pictures:
        gathered.append(picture)
        if len(gathered) == batch_size:
            yield read(gathered)
            gathered = []
    if gathered:
        yield read(gathered)
