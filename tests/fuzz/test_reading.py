"""What reads a file before llama.cpp does; `make fuzz-coverage` looks for more with a fuzzer that sees the coverage."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.cases import bases
from tests.fuzz.layout import Layout
from tests.fuzz.reading import read, seeds, small, spoilt, write

KEPT = sorted(Path(__file__).with_name("read").iterdir())
"""Inputs that ever did harm; none of them does any more."""
REDUCED = 300


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[Layout]:
    return [small(layout) for layout in bases(tmp_path_factory.mktemp("bases")).values()]


def test_what_a_fuzzer_begins_with_is_sound(layouts: list[Layout], tmp_path: Path) -> None:
    assert {read(write(data, tmp_path)) for data in seeds(layouts)} == {""}


def test_a_spoilt_header_is_read_or_refused_in_a_sentence(layouts: list[Layout], tmp_path: Path) -> None:
    random = Random(3)
    said = [read(write(spoilt(layouts, random), tmp_path)) for _ in range(REDUCED)]
    assert 0 < said.count("") < REDUCED


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_an_input_that_once_did_harm_is_refused(path: Path, tmp_path: Path) -> None:
    assert read(write(path.read_bytes(), tmp_path))
