"""KV cache types that a model cannot have, found before anything is loaded."""

from __future__ import annotations

from hybrid.model.spec import ModelSpec
from hybrid.schedule.kv_size import BLOCK_BYTES
from hybrid.schedule.placement import Placement

WITHOUT_FLASH_ATTENTION = frozenset({"grok"})
"""Architectures for which llama.cpp switches flash attention off, without which it has no quantised V
(`llama-context.cpp`)."""


def kv_refusal(spec: ModelSpec, placement: Placement) -> str | None:
    """Why the model cannot have the KV cache type of `placement`, as a sentence; None where it can.

    The head and llama.cpp store whole blocks; a layer whose heads are none is refused by both.
    """
    dtype = placement.kv_dtype
    block = BLOCK_BYTES[dtype][0]
    if block == 1:
        return None
    instead = "use --kv-type f16 or bf16"
    for layer in spec.layers:
        odd = next((dim for dim in (layer.head_dim_k, layer.head_dim_v) if dim % block), None)
        if odd is not None:
            where = f"layer {layer.index}'s heads have {odd}"
            return f"A {dtype} KV cache stores blocks of {block} values, and {where}; {instead}."
    if placement.n_gpu_layers < spec.n_layers and spec.architecture in WITHOUT_FLASH_ATTENTION:
        return f"llama.cpp has no flash attention for {spec.architecture}, and no {dtype} values without; {instead}."
    return None
