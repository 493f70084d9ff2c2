"""What a generation gives back: the text, and everything measured while it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybrid.schedule.placement import Placement

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of one generation; None where there was nothing to measure."""

    load_s: float | None
    """From the constructor's call to a model ready to run."""
    ttft_s: float | None
    """From the call to the first generated token."""
    prefill_tok_per_s: float | None
    """Prompt tokens evaluated (not those reused) per second."""
    decode_tok_per_s: float | None
    """Generated tokens after the first, per second."""


@dataclass(frozen=True)
class Memory:
    """Bytes held now: `device_bytes` by the head (weights and KV cache; 0 without one), `host_bytes` by the process
    (its resident set, in which an emulated device's bytes are contained)."""

    device_bytes: int
    host_bytes: int


class Completion(str):
    """Generated text; the attributes tell the rest.

    `tokens` are the generated ids, without an end-of-text token. `finish_reason` is "stop" (the model or a stop
    string ended it), "length" (max_tokens or the context did) or "interrupted".
    """

    tokens: list[int]
    n_prompt_tokens: int
    n_cached_tokens: int
    """Prompt tokens that were reused from what the caches held already."""
    finish_reason: FinishReason
    placement: Placement
    timings: Timings
    memory: Memory

    __slots__ = (
        "finish_reason",
        "memory",
        "n_cached_tokens",
        "n_prompt_tokens",
        "placement",
        "timings",
        "tokens",
    )

    def __new__(
        cls,
        text: str,
        *,
        tokens: list[int],
        n_prompt_tokens: int,
        n_cached_tokens: int,
        finish_reason: FinishReason,
        placement: Placement,
        timings: Timings,
        memory: Memory,
    ) -> Completion:
        self = super().__new__(cls, text)
        self.tokens = tokens
        self.n_prompt_tokens, self.n_cached_tokens = n_prompt_tokens, n_cached_tokens
        self.finish_reason = finish_reason
        self.placement, self.timings, self.memory = placement, timings, memory
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """For pickle and copy."""
        return (self.text,), {name: getattr(self, name) for name in self.__slots__}

    @property
    def text(self) -> str:
        """The text as a plain str."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "n_prompt_tokens": self.n_prompt_tokens,
            "n_cached_tokens": self.n_cached_tokens,
            "finish_reason": self.finish_reason,
            "placement": self.placement.to_dict(),
            "timings": asdict(self.timings),
            "memory": asdict(self.memory),
        }


class Stream(Iterator[str]):
    """Pieces of text as they are made; `completion` holds the whole once the last piece is out.

    `cancel` ends it early; a stream that is dropped half-way leaves the model usable.
    """

    def __init__(self, pieces: Iterator[str], result: list[Completion], cancel: Callable[[], None]) -> None:
        self._pieces, self._result, self._cancel = pieces, result, cancel

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """From any thread: stop at the token (or the part of the prompt) under way. What was generated is kept, and the
        stream ends with `finish_reason` "interrupted"."""
        self._cancel()

    @property
    def completion(self) -> Completion | None:
        """The whole result; None while the stream is not exhausted."""
        return self._result[0] if self._result else None
