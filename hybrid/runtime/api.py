"""Hybrid: the Python face of the runtime."""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from hybrid.errors import BadRequestError, OutOfMemoryError
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.model.splits import find_splits
from hybrid.runtime.completion import Completion, Stream
from hybrid.runtime.engine import Engine
from hybrid.runtime.generate import Options, generate
from hybrid.runtime.remember import record_of
from hybrid.runtime.sampling import SamplingParams
from hybrid.runtime.template import ChatTemplate, compile_template, encode_chat
from hybrid.runtime.turns import Turns
from hybrid.schedule.budget import VRAM_RESERVE
from hybrid.schedule.identity import identify
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import Profile, ProfileStore
from hybrid.schedule.scheduler import Plan, Request, plan

if TYPE_CHECKING:
    from hybrid.tail.vocab import Vocabulary

Message = Mapping[str, Any]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Hybrid.generate` and `Hybrid.chat` beside `stream`."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool


class Hybrid:
    """A model, its early layers on `device` in PyTorch and the rest on the CPU in llama.cpp.

    with Hybrid("smollm2-135m", n_gpu_layers=15, device="cpu") as model:
        print(model.generate("The capital of France is", max_tokens=16, temperature=0))

    Threads may share it: their requests wait for each other. Of streams only the one begun last can be read on.
    """

    _engine: Engine | None = None
    _file: ModelFile | None = None

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        n_gpu_layers: int | str = "auto",
        device: str | None = None,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
        n_sequences: int = 1,
        kv: str = "device",
        kv_dtype: str = "f16",
        vram_reserve: int = VRAM_RESERVE,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Open and load `model`, a path or a catalogue name (default: smollm2-135m).

        `n_gpu_layers` counts blocks from the first: 0..L, "all", or "auto" (0 without a GPU, else what fits).
        "auto" leaves `vram_reserve` bytes of the free VRAM to the desktop, and goes by speeds measured before.
        `n_ctx` is tokens per sequence (default: a modest one, see `notes`; 0: as trained). `progress` is called with
        "head" or "tail" and the loaded fraction, and with "prompt" during long prefills, from any thread.
        Raises HybridError (a sentence a user can act on); Ctrl-C leaves nothing behind.
        """
        start = time.perf_counter()
        self._progress = progress
        self._pid = os.getpid()
        self._turns = Turns()
        self._closing = False
        self._file = ModelFile(resolve_model(model))
        try:
            spec = read_spec(self._file)
            request = Request(
                n_gpu_layers=n_gpu_layers,
                device=device,
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_threads=n_threads,
                n_sequences=n_sequences,
                kv=kv,
                kv_dtype=kv_dtype,
                vram_reserve=vram_reserve,
            )
            self._store = ProfileStore(identify(self._file))
            auto = isinstance(n_gpu_layers, str) and n_gpu_layers.strip().lower() == "auto"
            profile = self._store.load() if auto else Profile()
            self._notes = list(profile.notes)
            self._engine = self._open(spec, plan(spec, request, profile), request, auto)
            if self._engine.head is not None:
                self._notes += self._engine.head.notes
            self._template: ChatTemplate | None = None
        except BaseException:
            self.close()
            raise
        self._load_s = time.perf_counter() - start

    def _open(self, spec: ModelSpec, chosen: Plan, request: Request, auto: bool) -> Engine:
        """The engine of a plan. Where `auto` chose it and the memory is not there after all, with a layer fewer."""
        assert self._file is not None
        self._notes += chosen.notes
        try:
            return Engine(self._file, spec, chosen.placement, progress=self._progress)
        except OutOfMemoryError as e:
            k = chosen.placement.n_gpu_layers
            fewer = [smaller for smaller in find_splits(spec).allowed if smaller < k]
            if not auto or not fewer:
                raise
            self._notes.append(f"{k} layers did not fit after all, {fewer[-1]} are tried ({e})")
        fixed = replace(request, n_gpu_layers=fewer[-1], device=chosen.placement.device, n_ctx=chosen.placement.n_ctx)
        return self._open(spec, replace(plan(spec, fixed), notes=()), request, auto)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """The file that is open (the first shard of several)."""
        assert self._file is not None
        return self._file.path

    @property
    def placement(self) -> Placement:
        """What runs where."""
        return self.engine.placement

    @property
    def engine(self) -> Engine:
        """The two halves, for those who want to drive them themselves. Raises BadRequestError once closed, and in
        a forked process, which has the memory but not the threads."""
        if self._engine is None:
            raise BadRequestError("This model is closed.")
        if os.getpid() != self._pid:
            raise BadRequestError("This model was loaded in another process; load it in the one that uses it.")
        return self._engine

    @property
    def notes(self) -> list[str]:
        """One-line facts the user should know: what `auto` chose and why, the context's size, expanded types."""
        return self._notes

    @property
    def n_ctx(self) -> int:
        """Tokens the context holds."""
        return self.placement.n_ctx

    @property
    def n_used(self) -> int:
        """Tokens in the context now."""
        return len(self.engine.tokens())

    # -- tokens --------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `add_special` puts BOS (and EOS) where the model wants them. Text that looks like a
        control token stays text unless `parse_special`."""
        return self.engine.vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens left out."""
        return self.engine.vocabulary.detokenize(list(tokens))

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits after every token, [n_tokens, n_vocab] float32, from an empty context (which is left empty)."""
        engine = self.engine
        self._check(tokens)
        with self._turns.queue, self._turns.begin(object()), engine.scoring():
            engine.trim(0)
            rows = engine.evaluate(list(tokens), outputs="all")
            engine.trim(0)
        assert rows is not None
        return rows

    # -- text ----------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Stream: ...
    @overload
    def generate(
        self, prompt: str | Sequence[int], *, stream: Literal[False] = ..., **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logit_bias: Mapping[int, float] | None = None,
        ignore_eos: bool = False,
        stream: bool = False,
    ) -> Completion | Stream:
        """Continue `prompt` (text, or token ids used as they are).

        Returns a Completion (a str), or with `stream` an iterator of pieces. `temperature` 0 is greedy; `max_tokens`
        None runs until the model ends or the context is full (`finish_reason` "length"). A stop string ends the text
        and is not part of it. Raises BadRequestError if the prompt does not fit the context.
        """
        options = Options(
            sampling=SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repeat_penalty=repeat_penalty,
                repeat_last_n=repeat_last_n,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                seed=seed,
                logit_bias=dict(logit_bias or {}),
            ),
            max_tokens=max_tokens,
            stop=_stops(stop),
            ignore_eos=ignore_eos,
        )
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else _ids(prompt)
        self._check(tokens)
        result: list[Completion] = []
        cancelled = False
        pieces = self._pieces(tokens, options, result, lambda: cancelled or self._closing)

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            if self._turns.at_work(pieces):
                self.engine.interrupt()

        if stream:
            return Stream(self._in_turn(pieces), result, cancel)
        with self._turns.queue, self._turns.begin(pieces):
            for _ in pieces:
                pass
        return result[0]

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Stream: ...
    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[False] = ..., **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Completion | Stream:
        """The assistant's next message in a conversation of {"role", "content"} messages, by the model's own chat
        template. Takes the options of `generate`. What the caches already hold of the conversation is reused."""
        template = self.chat_template
        tokens = encode_chat(template, self.engine.vocabulary, messages)
        options["stop"] = [*_stops(options.get("stop")), *template.stop]
        if stream:
            return self.generate(tokens, stream=True, **options)
        return self.generate(tokens, **options)

    @property
    def chat_template(self) -> ChatTemplate:
        """The compiled chat template; says in `notes`, once, where it is not the model's own."""
        if self._template is None:
            vocabulary = self.engine.vocabulary
            self._template = compile_template(
                vocabulary.chat_template,
                bos_token=_spelled(vocabulary, vocabulary.bos),
                eos_token=_spelled(vocabulary, vocabulary.eos),
            )
            if self._template.note:
                self._notes.append(self._template.note)
        return self._template

    def close(self) -> None:
        """Free both halves and the file; a request of another thread is interrupted first. Calling it again does
        nothing; nor does it where the model was loaded in another process, which goes on using it."""
        if self._file is None or os.getpid() != self._pid:
            return
        self._closing = True
        if self._engine is not None:
            self._engine.interrupt()
        with self._turns.queue, self._turns.begin(self):
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._file.close()

    def __enter__(self) -> Hybrid:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        """A model that nobody can reach any more gives its memory back, `with` or not."""
        if not sys.is_finalizing():
            self.close()

    def __reduce__(self) -> NoReturn:
        """Copies would share one KV state; other processes cannot share it at all."""
        raise TypeError("A loaded model cannot be copied or pickled; load it again where it is needed.")

    def _check(self, tokens: Sequence[int]) -> None:
        n_vocab = self.engine.vocabulary.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise BadRequestError(f"Token {token} is not in this model's vocabulary of {n_vocab}.")
        if not tokens:
            raise BadRequestError("The prompt is empty.")

    def _in_turn(self, pieces: Iterator[str]) -> Iterator[str]:
        """`pieces` one by one, the model free between them."""
        turn = self._turns.begin
        while True:
            assert self.engine  # not closed since
            with self._turns.queue, turn(pieces):
                turn = self._turns.resume
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _pieces(
        self, tokens: list[int], options: Options, result: list[Completion], cancelled: Callable[[], bool]
    ) -> Generator[str, None, None]:
        progress = self._progress
        completion = yield from generate(
            self.engine,
            tokens,
            options,
            load_s=self._load_s,
            cancelled=cancelled,
            on_prefill=progress and (lambda done, total: progress("prompt", done / total)),
        )
        result.append(completion)
        self._remember(completion)

    def _remember(self, completion: Completion) -> None:
        """Add the speed to the profile, so that `auto` rests on what was measured."""
        record = record_of(completion)
        if record is not None:
            self._store.add(record)


def _ids(prompt: object) -> list[int]:
    """Token ids as plain ints. Raises BadRequestError for what is neither text nor token ids."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping)):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            pass
    raise BadRequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__} {prompt!r:.40}.")


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """What may be given as `stop`, as a tuple of strings."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(s, str) for s in stops):
        raise BadRequestError(f"stop must be a string or a list of strings, not {stop!r:.40}.")
    return stops


def _spelled(vocabulary: Vocabulary, token: int) -> str:
    """How the vocabulary writes a token it may not have (-1)."""
    return vocabulary.text(token) if token >= 0 else ""
