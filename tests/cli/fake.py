"""A stand-in for a loaded model: echoes the last message, word by word. For what is the chat's own logic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid.errors import BadRequestError
from hybrid.runtime.completion import Completion, Memory, Timings
from hybrid.schedule.placement import Placement


class FakeStream:
    """Yields words until cancelled; `between` is called before each."""

    def __init__(self, model: FakeModel, words: list[str], between: Callable[[FakeStream], None]) -> None:
        self._model, self._words, self._between = model, words, between
        self._cancelled = False
        self.completion: Completion | None = None

    def cancel(self) -> None:
        self._cancelled = True

    def __iter__(self) -> Iterator[str]:
        made: list[str] = []
        for word in self._words:
            self._between(self)
            if self._cancelled:
                break
            made.append(word)
            yield word
        self._model.n_used += len(made)
        full = self._model.n_used >= self._model.n_ctx
        self.completion = Completion(
            "".join(made),
            tokens=list(range(len(made))),
            n_prompt_tokens=3,
            n_cached_tokens=1,
            finish_reason="interrupted" if self._cancelled else "length" if full else "stop",
            placement=self._model.placement,
            timings=Timings(load_s=1.0, ttft_s=0.25, prefill_tok_per_s=100.0, decode_tok_per_s=None),
            memory=Memory(device_bytes=0, host_bytes=2**20),
        )


class FakeModel:
    """Has what Chat needs of Hybrid."""

    def __init__(self, n_ctx: int = 100, between: Callable[[FakeStream], None] = lambda stream: None) -> None:
        self.placement = Placement(device="cpu", n_gpu_layers=2, n_ctx=n_ctx)
        self.model_path = Path("fake.gguf")
        self.notes: list[str] = []
        self.n_ctx, self.n_used = n_ctx, 0
        self.between = between
        self.seen: list[list[dict[str, str]]] = []

    def chat(self, messages: Sequence[dict[str, str]], *, stream: bool, **options: Any) -> FakeStream:
        assert stream
        self.seen.append([dict(m) for m in messages])
        text = messages[-1]["content"]
        if len(text) > self.n_ctx:
            raise BadRequestError(f"The prompt has {len(text)} tokens, but the context holds {self.n_ctx}.")
        return FakeStream(self, [" " + word for word in f"You said {text}".split()], self.between)
