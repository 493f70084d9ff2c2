"""What a finished generation adds to the profile."""

from __future__ import annotations

from hybrid.runtime.completion import Completion
from hybrid.schedule.profile import Record, now

LEAST_DECODED, LEAST_PROMPT = 16, 64
"""Tokens: less says little about speed."""


def record_of(completion: Completion) -> Record | None:
    """Its speeds; None where too few tokens were made and read, or the model was loaded for several sequences, of which
    this was one. A prompt counts only if none of it was reused, for its seconds depend on the depth it begins at."""
    if completion.placement.n_sequences > 1:
        return None
    speed, n = completion.timings, len(completion.tokens)
    decode_s: tuple[float, ...] = ()
    prefill_s: tuple[float, ...] = ()
    if speed.decode_tok_per_s and n > LEAST_DECODED:
        decode_s = (1 / speed.decode_tok_per_s,)
    n_prompt = completion.n_prompt_tokens
    if speed.prefill_tok_per_s and n_prompt >= LEAST_PROMPT and not completion.n_cached_tokens:
        prefill_s = (n_prompt / speed.prefill_tok_per_s,)
    if not decode_s and not prefill_s:
        return None
    return Record(
        placement=completion.placement,
        source="run",
        at=now(),
        depth=n_prompt + n // 2,
        decode_s=decode_s,
        n_prompt=n_prompt if prefill_s else 0,
        prefill_s=prefill_s,
        device_bytes=completion.memory.device_bytes or None,
        host_bytes=completion.memory.host_bytes,
    )
