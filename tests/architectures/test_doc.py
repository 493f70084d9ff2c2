"""docs/models.md says what the program does."""

from __future__ import annotations

from hybrid.model.known import KNOWN
from scripts.models_doc import PATH, text
from tests.architectures.models import MODELS


def test_the_page_of_models_is_current() -> None:
    assert PATH.read_text() == text(), "run: python -m scripts.models_doc"


def test_every_architecture_in_the_table_is_tested() -> None:
    assert {tiny.architecture for tiny in MODELS.values()} == set(KNOWN)
    with_experts = {tiny.architecture for tiny in MODELS.values() if "expert_count" in tiny.keys}
    assert with_experts == {name for name, a in KNOWN.items() if a.experts is not None}
