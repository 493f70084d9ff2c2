"""What cannot be split, and why: architectures, and keys that change what a known architecture computes."""

from __future__ import annotations

REFUSED = {
    "bloom": "llama.cpp normalises again what it is given as hidden states",
    "gemma3n": "every layer reads an embedding of the tokens, which the CPU half has not",
    "glm4moe": "llama.cpp takes no hidden states for this architecture",
}
"""`general.architecture` -> why no tail of it gives the whole model's logits."""

REFUSED_KEYS = {
    "nextn_predict_layers": "layers for multi-token prediction cannot be split",
    "expert_group_count": "its experts are chosen in groups",
}
"""Keys of any architecture that make the model another one where they are there and not zero. Those of a single
architecture stand with it in `known.py`."""
