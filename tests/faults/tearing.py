"""Files as a crash or a bad disk leaves them: cut off at several lengths, and with a byte changed here and there."""

import random
from collections.abc import Iterator
from pathlib import Path

from .machine import ALL


def torn(path: Path, flips: int, cuts: int = 5, seed: int = 0) -> Iterator[str]:
    """Damage a file in one way after the other, and mend it at the end. Gives what was done, in words."""
    intact, chance = path.read_bytes(), random.Random(seed)
    size = len(intact)
    lengths = [size // 2, 0, size - 2, 1, size // 3]
    for length in lengths if ALL else lengths[:cuts]:
        path.write_bytes(intact[:length])
        yield f"{path.name} cut to {length} of {size} bytes"
    for _ in range(20 * flips if ALL else flips):
        at = chance.randrange(size)
        path.write_bytes(intact[:at] + bytes([intact[at] ^ chance.randrange(1, 256)]) + intact[at + 1 :])
        yield f"{path.name} with another byte {at}"
    path.write_bytes(intact)
