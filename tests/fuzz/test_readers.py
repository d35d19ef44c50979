"""Readers of files: whatever is in a file, they give a value or refuse it in a sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .damage import answer, damaged, few
from .intact import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def put(folder: Path, kind: str, content: bytes) -> Path:
    path = folder / kind.replace(" ", "-") / CASES[kind].name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", CASES)
def test_intact_files_are_read(folder: Path, kind: str) -> None:
    CASES[kind].read(put(folder, kind, CASES[kind].content))


@pytest.mark.parametrize("kind", CASES)
def test_damaged_files_are_read_or_refused(folder: Path, kind: str) -> None:
    case = CASES[kind]

    @few(40)
    @given(damaged(case.content))
    def check(content: bytes) -> None:
        answer(case.read, put(folder, kind, content), refusals=case.refusals)

    check()


@pytest.mark.parametrize("kind", CASES)
def test_anything_is_read_or_refused(folder: Path, kind: str) -> None:
    case = CASES[kind]

    @few(8)
    @given(st.binary(max_size=64) | st.text(max_size=32).map(lambda text: text.encode("utf-8", "surrogatepass")))
    def check(content: bytes) -> None:
        answer(case.read, put(folder, kind, content), refusals=case.refusals)

    check()
