"""The methods of `llama_cpp.Llama` that scripts call most: same arguments, same dictionaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from hybrid.errors import BadRequestError, UnsupportedError
from hybrid.runtime.arguments import stop_strings, token_biases, token_ids
from hybrid.runtime.completion import Completion, Stream
from hybrid.runtime.grammar import grammar_text
from hybrid.runtime.loaded import Loaded
from hybrid.runtime.logprobs import Logits, Logprobs
from hybrid.runtime.reply import Options
from hybrid.runtime.responses import Reply, Response, chat_chunks, tool_chunks, usage
from hybrid.runtime.sampling import SamplingParams
from hybrid.runtime.template import encode_chat
from hybrid.runtime.tools import as_tools, wanted_form

if TYPE_CHECKING:
    from hybrid.runtime.template import ChatTemplate

Processor = Callable[[Any, Any], Any]


class LlamaAPI(Loaded):
    """`create_completion`, `create_chat_completion` and calling the model, for `Hybrid`.

    What `llama_cpp.Llama` accepts and this cannot do is an error, never left out in silence.
    """

    if TYPE_CHECKING:
        _spm_infill: bool

        @property
        def chat_template(self) -> ChatTemplate: ...
        def _defaults(self) -> dict[str, Any]: ...
        def _run(self, tokens: list[int], options: Options, stream: bool) -> Completion | Stream: ...

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = [],
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Sequence[Processor] | None = None,
        logits_processor: Sequence[Processor] | None = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
    ) -> Response | Iterator[Response]:
        """Continue `prompt` (text, in which control tokens may be spelled; or token ids) as `llama_cpp.Llama` does.

        Returns its completion dictionary, or with `stream` an iterator of chunks. `suffix` is what comes after the text
        that is to be made, for models trained to fill in a middle. `logprobs` needs no setting in the constructor.
        """
        if suffix is not None:
            tokens = self._infill(prompt, suffix)
        else:
            tokens = self.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else token_ids(prompt)
        options = self._options(
            self._sampling(
                temperature=temperature,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                repeat_penalty=repeat_penalty,
                top_k=top_k,
                seed=seed,
                mirostat=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                logit_bias=logit_bias,
            ),
            tfs_z=tfs_z,
            max_tokens=max_tokens,
            stop=stop,
            grammar=grammar,
            stopping_criteria=stopping_criteria,
            logits_processor=logits_processor,
        )
        before = "" if not echo else prompt if isinstance(prompt, str) else self.detokenize(tokens)
        offset = 0 if echo else len(prompt) if isinstance(prompt, str) else len(self.detokenize(tokens))
        reply = Reply(str(model if model is not None else self.model_path))
        return self._answer(reply, tokens, options, stream, _top(logprobs, "logprobs"), before, offset)

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = [],
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Sequence[Processor] | None = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Response | Iterator[Response]:
        """The assistant's next message, by the model's own chat template, as `llama_cpp.Llama` gives it.

        `response_format` {"type": "json_object", "schema": …} makes the answer JSON of that schema. A tool that
        `tool_choice` names is called for certain; with "auto" the model's own words come back as text.
        """
        form = wanted_form(response_format, *as_tools(functions, function_call, tools, tool_choice))
        template = self.chat_template
        variables = {"functions": functions, "function_call": function_call, "tools": tools, "tool_choice": tool_choice}
        tokens = encode_chat(template, self.engine.vocabulary, messages, variables=variables)
        options = self._options(
            self._sampling(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                typical_p=typical_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repeat_penalty=repeat_penalty,
                seed=seed,
                mirostat=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                logit_bias=logit_bias,
            ),
            tfs_z=tfs_z,
            max_tokens=max_tokens,
            stop=[*stop_strings(stop), *template.stop],
            grammar=grammar if form.grammar is None else form.grammar,
            logits_processor=logits_processor,
        )
        n_top = _top(0 if top_logprobs is None else top_logprobs, "top_logprobs") if logprobs else None
        reply = Reply(str(model if model is not None else self.model_path))
        made_of = self._answer(reply, tokens, options, stream, n_top, "", 0)
        if not isinstance(made_of, dict):
            return chat_chunks(reply, made_of) if form.tool is None else tool_chunks(reply, form.tool, made_of)
        choice, count = made_of["choices"][0], made_of["usage"]
        if form.tool is None:
            message = {"role": "assistant", "content": choice["text"]}
            return reply.message(message, choice["logprobs"], choice["finish_reason"], count)
        message = {"role": "assistant", "content": None, **reply.call(form.tool, choice["text"])}
        return reply.message(message, choice["logprobs"], "tool_calls", count)

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str, **kwargs: Any) -> Self:
        """The model in `filename` (`*` and `?` allowed) of a Hugging Face repository; `kwargs` are the constructor's.

        All shards are fetched. Where files are kept is huggingface_hub's business (HF_HOME): there is no `local_dir`.
        """
        return cls(f"hf:{repo_id}/{filename}", **kwargs)  # type: ignore[call-arg]

    def create_embedding(self, input: str | list[str], model: str | None = None) -> NoReturn:
        """Not something this program does. Raises UnsupportedError."""
        raise UnsupportedError("Hybrid makes no embeddings; use llama_cpp.Llama(model_path, embedding=True) for them.")

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not something this program does. Raises UnsupportedError."""
        self.create_embedding("")

    # -- inside --------------------------------------------------------------------------------------------------

    def _answer(
        self,
        reply: Reply,
        tokens: list[int],
        options: Options,
        stream: bool,
        n_top: int | None,
        before: str,
        offset: int,
    ) -> Response | Iterator[Response]:
        """The completion of `tokens` as a text completion, or its chunks; `before` is put in front of the text."""
        logprobs = None if n_top is None else Logprobs(self.engine.vocabulary, n_top, offset)
        if logprobs is not None:
            if before:
                self._add_prompt(tokens, logprobs)
            options = replace(options, on_token=logprobs.add)
        result = self._run(tokens, options, stream)
        if isinstance(result, Stream):
            return _chunks(reply, result, logprobs, before)
        found = logprobs.take() if logprobs is not None else None
        answer = reply.text(before + result, found, result.finish_reason)
        return {**answer, "usage": usage(len(tokens), len(result.tokens))}

    def _add_prompt(self, tokens: list[int], logprobs: Logprobs) -> None:
        """The prompt's own tokens, without BOS: what `echo` shows. Nothing predicts the first."""
        begin = int(tokens[0] == self.engine.vocabulary.bos)
        for token in tokens[begin : begin + 1]:
            logprobs.add(token, None)

        def see(i: int, row: Logits) -> None:
            if begin <= i < len(tokens) - 1:
                logprobs.add(tokens[i + 1], row)

        self.score(tokens, see)

    def _infill(self, prompt: str | Sequence[int], suffix: str) -> list[int]:
        """Prefix and suffix around the middle that the model is to fill in."""
        vocabulary = self.engine.vocabulary
        if not isinstance(suffix, str):
            raise BadRequestError(f"suffix must be text, not {type(suffix).__name__}.")
        if min(vocabulary.fim) < 0:
            raise UnsupportedError(
                "This model was not trained to fill in a middle (its vocabulary has no tokens for it); give no suffix."
            )
        before, after, middle = vocabulary.fim
        front = self.tokenize(prompt, add_special=False) if isinstance(prompt, str) else token_ids(prompt)
        first, second = [before, *front], [after, *self.tokenize(suffix, add_special=False)]
        parts = [*second, *first] if self._spm_infill else [*first, *second]
        return [vocabulary.bos] * vocabulary.add_bos + parts + [middle]

    def _sampling(self, *, seed: int | None, logit_bias: Mapping[Any, float] | None, **asked: Any) -> SamplingParams:
        """Sampling parameters, the constructor's seed and the like where the request gives none."""
        if seed is not None:
            asked["seed"] = seed
        if asked["mirostat"] and asked["temperature"]:
            asked["temperature"] = 1.0  # to that class it only says whether to sample; llama.cpp itself applies it
        return SamplingParams(**{**self._defaults(), **asked, "logit_bias": token_biases(logit_bias)})

    def _options(
        self,
        sampling: SamplingParams,
        *,
        tfs_z: float,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        grammar: Any,
        logits_processor: Sequence[Processor] | None,
        stopping_criteria: Sequence[Processor] | None = None,
    ) -> Options:
        if tfs_z != 1.0:
            raise UnsupportedError("llama.cpp has no tail-free sampling any more: leave tfs_z at 1.0.")
        return Options(
            sampling=sampling,
            max_tokens=None if max_tokens is None or max_tokens <= 0 else max_tokens,
            stop=stop_strings(stop),
            grammar="" if grammar is None else grammar_text(grammar),
            penalize_prompt=False,  # nor do that class's penalties see it
            edit_logits=_edits(logits_processor),
            is_over=_criteria(stopping_criteria),
        )


def _chunks(reply: Reply, stream: Stream, logprobs: Logprobs | None, before: str) -> Iterator[Response]:
    """A stream as chunks of a text completion; each carries the log-probabilities of the tokens since the last."""
    for piece in itertools.chain([before] * bool(before), stream):
        yield reply.text(piece, logprobs.take() if logprobs is not None else None, None)
    assert stream.completion is not None, "a stream that is exhausted has its completion"
    rest = logprobs.take() if logprobs is not None else None
    if rest is not None and rest["tokens"]:  # tokens whose text was held back to the end, or that have none
        yield reply.text("", rest, None)
    yield reply.text("", None, stream.completion.finish_reason)


def _top(n: int | None, name: str) -> int | None:
    """How many of the likeliest tokens to list."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise BadRequestError(f"{name} must be a whole number of 0 or more, not {n!r}.")
    return n


def _edits(processors: Sequence[Processor] | None) -> Callable[[Sequence[int], Logits], Logits] | None:
    """`LogitsProcessorList`: each is called with the tokens so far and the logits, and returns logits."""
    if not processors:
        return None
    each = _callables(processors, "logits_processor")

    def edit(tokens: Sequence[int], logits: Logits) -> Logits:
        ids = np.array(tokens, np.intc)
        for processor in each:
            logits = np.asarray(processor(ids, logits), np.float32)
        return logits

    return edit


def _criteria(criteria: Sequence[Processor] | None) -> Callable[[Sequence[int], Logits], bool] | None:
    """`StoppingCriteriaList`: the text ends where one of them returns true."""
    if not criteria:
        return None
    each = _callables(criteria, "stopping_criteria")
    return lambda tokens, logits: any(bool(criterion(np.array(tokens, np.intc), logits)) for criterion in each)


def _callables(values: Any, name: str) -> list[Processor]:
    each = [values] if callable(values) and not isinstance(values, Sequence) else list(values)
    if not all(callable(value) for value in each):
        raise BadRequestError(f"{name} must be a list of functions.")
    return each
