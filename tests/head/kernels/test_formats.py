"""The table of block formats: it is ggml's, and planes lose nothing."""

from __future__ import annotations

import pytest
import torch

from hybrid.head.dequant import SUPPORTED
from hybrid.head.kernels.formats import FORMATS, LANES, fits
from hybrid.model.ggml_types import GGML_TYPES, type_name
from tests.head.kernels.blocks import any_bytes, in_planes, width

CPU = torch.device("cpu")


def test_every_type_that_the_head_keeps_has_a_format() -> None:
    assert set(FORMATS) == SUPPORTED


@pytest.mark.parametrize("kind", sorted(FORMATS), ids=type_name)
def test_fields_cover_each_byte_of_a_block_once(kind: int) -> None:
    form, ggml = FORMATS[kind], GGML_TYPES[kind]
    covered = sorted(at for field in form.fields for at in range(field.start, field.start + field.size))
    assert covered == list(range(form.n_bytes))
    assert form.n_bytes * ggml.block == ggml.n_bytes * form.values
    assert form.name == ggml.name.lower()
    assert form.block_units * form.unit_values == form.values
    if ggml.block > 1:
        assert form.fields[0].size == form.block_units * LANES


@pytest.mark.parametrize("kind", sorted(FORMATS), ids=type_name)
def test_planes_hold_the_same_bytes_and_give_them_back(kind: int) -> None:
    raw = any_bytes(kind, 7, width(kind, 3), seed=kind)
    planes = in_planes(raw, kind, width(kind, 3), CPU)
    assert planes.nbytes == raw.nbytes
    assert torch.equal(planes.data.sort().values, raw.flatten().sort().values)
    assert torch.equal(planes.rows(0, 7), raw)
    assert torch.equal(planes.rows(5, 99), raw[5:])


def test_a_row_that_is_no_whole_number_of_blocks_does_not_fit() -> None:
    assert fits(8, 96)
    assert not fits(8, 100)
    assert not fits(12, 96)
    assert not fits(16, 256)  # IQ2_XXS has no format
