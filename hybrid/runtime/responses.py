"""Answers as dictionaries, in the shapes of llama-cpp-python's `llama_types`, which are OpenAI's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

Response = dict[str, Any]


class Reply:
    """What every dictionary about one request carries: its id, its time, the model's name."""

    def __init__(self, model: str) -> None:
        self.id, self.created, self.model = f"cmpl-{uuid.uuid4()}", int(time.time()), model

    def text(self, text: str, logprobs: Response | None, finish_reason: str | None) -> Response:
        """A text completion, or a chunk of one (then without `usage`)."""
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def message(self, message: Response, logprobs: Response | None, finish_reason: str, usage: Response) -> Response:
        """A chat completion."""
        choice = {"index": 0, "message": message, "logprobs": chat_logprobs(logprobs), "finish_reason": finish_reason}
        return {**self._chat("chat.completion", choice), "usage": usage}

    def delta(self, delta: Response, logprobs: Response | None = None, finish_reason: str | None = None) -> Response:
        """A chunk of a chat completion."""
        choice = {"index": 0, "delta": delta, "logprobs": chat_logprobs(logprobs), "finish_reason": finish_reason}
        return self._chat("chat.completion.chunk", choice)

    def call(self, tool: str, arguments: str) -> Response:
        """The keys of a message that calls `tool`: as `tool_calls`, and as the older `function_call`."""
        function = {"name": tool, "arguments": arguments}
        call = {"id": f"call__0_{tool}_{self.id}", "type": "function", "function": dict(function)}
        return {"function_call": function, "tool_calls": [call]}

    def _chat(self, kind: str, choice: Response) -> Response:
        return {
            "id": "chat" + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def usage(n_prompt: int, n_completion: int) -> Response:
    """Tokens read and made."""
    return {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}


def chat_logprobs(logprobs: Response | None) -> Response | None:
    """The shape chat completions have for what text completions call `logprobs`."""
    if logprobs is None:
        return None
    content = [
        {
            "token": token,
            "bytes": None,
            "logprob": value,
            "top_logprobs": [{"token": t, "logprob": v, "bytes": None} for t, v in top.items()],
        }
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    ]
    return {"content": content, "refusal": None}


def chat_chunks(reply: Reply, chunks: Iterator[Response]) -> Iterator[Response]:
    """The stream of a chat: the role, then pieces of text, then an empty delta with the reason."""
    yield reply.delta({"role": "assistant"})
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = {"content": choice["text"]} if choice["finish_reason"] is None else {}
        yield reply.delta(delta, choice["logprobs"], choice["finish_reason"])


def tool_chunks(reply: Reply, tool: str, chunks: Iterator[Response]) -> Iterator[Response]:
    """The stream of a tool call: the pieces are of its arguments, a JSON text."""
    nothing = {"content": None, "function_call": None, "tool_calls": None}
    yield reply.delta({"role": "assistant", **nothing})
    for chunk in chunks:
        choice = chunk["choices"][0]
        call = reply.call(tool, choice["text"])
        calls = [{"index": 0, **call["tool_calls"][0]}]
        yield reply.delta({"role": None, "content": None, **call, "tool_calls": calls}, choice["logprobs"])
    yield reply.delta({"role": None, **nothing}, finish_reason="tool_calls")
