"""What a GGUF holds besides layers: whether it is a model at all, and whether its vocabulary is whole."""

from __future__ import annotations

from hybrid.model.gguf_values import array_item_type
from hybrid.model.hparams import Hparams

OTHER_TYPES = {
    "mmproj": "it is a projector for pictures or sound (mmproj), which goes with a model and is none",
    "adapter": "it is an adapter (LoRA), which goes with a model and is none",
    "imatrix": "it is an importance matrix, which helps to quantise a model and is none",
}
"""`general.type` of files that are no models."""
OTHER_ARCHITECTURES = {"clip": OTHER_TYPES["mmproj"], "controlvector": "it is a control vector, which is no model"}
STRING, FLOAT32, INT32 = 8, 6, 5
"""GGUF value types."""
TOKENS = "tokenizer.ggml.tokens"
BESIDE_TOKENS = {"tokenizer.ggml.scores": (FLOAT32, INT32), "tokenizer.ggml.token_type": (INT32,)}
"""Arrays with something for every token, and their items' types."""


def check_kind(hparams: Hparams) -> None:
    """Raise BadFileError for a file that only goes with a model."""
    file = hparams.file
    kind = file.metadata.get("general.type")
    what = OTHER_ARCHITECTURES.get(file.architecture) or (OTHER_TYPES.get(kind) if isinstance(kind, str) else None)
    if what is not None:
        hparams.fail(what)


def check_vocabulary(hparams: Hparams) -> None:
    """Raise BadFileError where the arrays of the vocabulary are of the wrong type or too short (llama.cpp reads them
    without their lengths)."""
    file = hparams.file
    tokens = file.fields.get(TOKENS)
    if tokens is None:
        return
    if array_item_type(tokens) != STRING:
        hparams.fail(f"{TOKENS} is not an array of strings")
    n = file.array_length(TOKENS) or 0
    for key, kinds in BESIDE_TOKENS.items():
        field = file.fields.get(key)
        if field is None:
            continue
        if array_item_type(field) not in kinds:
            hparams.fail(f"{key} is not an array of numbers of the right type")
        if (file.array_length(key) or 0) < n:
            hparams.fail(f"{key} has {file.array_length(key)} items for {n} tokens")
