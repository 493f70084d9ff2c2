"""Hybrid: the Python face of the runtime."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from hybrid.errors import BadRequestError
from hybrid.model.architectures import read_spec
from hybrid.model.catalog import resolve_model
from hybrid.model.file import ModelFile
from hybrid.prefix import common_prefix
from hybrid.runtime.arguments import stop_strings
from hybrid.runtime.batch import Batch, Finished, Task
from hybrid.runtime.completion import Completion, Stream
from hybrid.runtime.curve import BatchCurve, curve_of
from hybrid.runtime.gbnf import check_grammar
from hybrid.runtime.generate import generate
from hybrid.runtime.llama_api import LlamaAPI
from hybrid.runtime.llama_arguments import read_llama_arguments
from hybrid.runtime.options import GenerateOptions, options_of
from hybrid.runtime.remember import record_of
from hybrid.runtime.reply import Options
from hybrid.runtime.saved_state import restore_state, save_state
from hybrid.runtime.template import ChatTemplate, chosen_template, compile_template, encode_chat
from hybrid.runtime.turns import Turns
from hybrid.schedule.budget import VRAM_RESERVE
from hybrid.schedule.identity import identify
from hybrid.schedule.profile import Profile, ProfileStore
from hybrid.schedule.scheduler import Request, plan

if TYPE_CHECKING:
    from hybrid.tail.vocab import Vocabulary

Message = Mapping[str, Any]
T = TypeVar("T")
MIN_PREFIX = 16
"""Tokens that all prompts of `generate_many` must begin with to be evaluated apart."""


class Hybrid(LlamaAPI):
    """A model, its early layers on `device` in PyTorch and the rest on the CPU in llama.cpp.

    with Hybrid("smollm2-135m", n_gpu_layers=15, device="cpu") as model:
        print(model.generate("The capital of France is", max_tokens=16, temperature=0))

    Threads may share it: their requests wait for each other. Of streams only the one begun last can be read on.
    """

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
        n_sequences: int | str = 1,
        most_sequences: int = 8,
        n_draft: int = 0,
        kv: str = "device",
        kv_dtype: str = "f16",
        kv_budget: int | None = None,
        kv_keep_sliding: bool = True,
        engine: str = "auto",
        chat_template: str | Path | None = None,
        vram_reserve: int = VRAM_RESERVE,
        progress: Callable[[str, float], None] | None = None,
        model_path: str | Path | None = None,
        seed: int | None = None,
        verbose: bool = False,
        **llama: Any,
    ) -> None:
        """Open and load `model`, a path or a catalogue name (default: smollm2-135m).

        `n_gpu_layers` counts blocks from the first: 0..L, "all", or "auto" (0 without a GPU, else what fits).
        "auto" leaves `vram_reserve` bytes of the free VRAM to the desktop, and goes by speeds measured before.
        `n_ctx` is tokens per sequence (default: a modest one, see `notes`; 0: as trained); `n_sequences`
        ("auto": as many as fit, up to `most_sequences`) can be at work at once, with up to `n_draft` guessed tokens in
        a step (see `generate_many`). `progress` is called with
        "head" or "tail" and the loaded fraction, and with "prompt" during long prefills, from any thread.

        `kv` says where the KV cache of the GPU's layers lives: "device"; "stream" (host memory, fetched a layer
        ahead); "attend" (host memory, where the CPU attends); "tiered" (the most recent `kv_budget` bytes on the
        device, the rest as `attend`). Sliding-window layers stay on the device unless `kv_keep_sliding` is False.
        `kv_dtype` is the precision of both halves' caches.
        `engine` "llama.cpp" gives the layers to llama.cpp's own GPU instead of ours, counted from the last, where
        llama-cpp-python was built with one. `chat_template` replaces the model's own: a name that llama.cpp knows,
        such as "chatml", a file, or Jinja text.

        For code written for `llama_cpp.Llama`: `model_path` is `model`, `n_gpu_layers` -1 is "all", `seed` is that of
        requests that give none, `verbose` prints the `notes` on stderr, and its other arguments (`llama`) are taken
        where they mean something here, or ask for what is so anyway.
        Raises HybridError (a sentence a user can act on); Ctrl-C leaves nothing behind.
        """
        start = time.perf_counter()
        self._progress = progress
        self._pid = os.getpid()
        self._turns = Turns()
        self._closing = False
        if model is not None and model_path is not None:
            raise BadRequestError("Give the model once: as the first argument or as model_path.")
        asked = read_llama_arguments(llama, engine, n_threads)
        self._seed, self._repeat_last_n, self._spm_infill = seed, asked.repeat_last_n, asked.spm_infill
        self._file = ModelFile(resolve_model(model if model is not None else model_path))
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
                most_sequences=most_sequences,
                n_draft=n_draft,
                kv=kv,
                kv_dtype=asked.kv_dtype or kv_dtype,
                kv_budget=kv_budget,
                kv_keep_sliding=kv_keep_sliding,
                engine=engine,
                offload_kqv=asked.offload_kqv,
                vram_reserve=vram_reserve,
            )
            self._store = ProfileStore(identify(self._file))
            auto = isinstance(n_gpu_layers, str) and n_gpu_layers.strip().lower() == "auto"
            profile = self._store.load() if auto else Profile()
            self._notes = list(profile.notes)
            self._engine = self._open(spec, plan(spec, request, profile), request, auto)
            self._notes += self._engine.notes
            self._template: ChatTemplate | None = None
            if chat_template is not None:
                self._template = chosen_template(chat_template, **self._template_tokens())
        except BaseException:
            self.close()
            raise
        self._load_s = time.perf_counter() - start
        if verbose:
            print(*self._notes, sep="\n", file=sys.stderr)

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
        repeat_last_n: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logit_bias: Mapping[Any, float] | None = None,
        ignore_eos: bool = False,
        grammar: Any = None,
        json_schema: str | Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Completion | Stream:
        """Continue `prompt` (text, or token ids used as they are).

        Returns a Completion (a str), or with `stream` an iterator of pieces. `temperature` 0 is greedy; `max_tokens`
        None runs until the model ends or the context is full (`finish_reason` "length"). The penalties look back on
        `repeat_last_n` tokens (-1: all; default: 64, or the constructor's `last_n_tokens_size`). A stop string ends
        the text and is not part of it. `grammar` (GBNF) or `json_schema` says what the text may be; where `max_tokens`
        cuts it short, it is a beginning of that. Raises BadRequestError if the prompt does not fit the context.
        """
        options = options_of(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            repeat_last_n=self._repeat_last_n if repeat_last_n is None else repeat_last_n,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=self._seed if seed is None else seed,
            logit_bias=logit_bias,
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            grammar=grammar,
            json_schema=json_schema,
        )
        return self._run(self._prompt(prompt), options, stream)

    def _defaults(self) -> dict[str, Any]:
        """Sampling parameters that the constructor set for requests that say nothing else."""
        asked = {"seed": self._seed, "repeat_last_n": self._repeat_last_n}
        return {name: value for name, value in asked.items() if value is not None}

    def _run(self, tokens: list[int], options: Options, stream: bool) -> Completion | Stream:
        self._check(tokens)
        if options.grammar:
            check_grammar(options.grammar)
        result: list[Completion] = []
        cancelled = False
        pieces = self._pieces(tokens, options, result, lambda: cancelled or self._closing)

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            engine = self._engine
            if engine is not None and self._turns.at_work(pieces):
                engine.interrupt()

        if stream:
            return Stream(self._in_turn(pieces), result, cancel)
        with self._turns.queue, self._turns.begin(pieces):
            assert self.engine  # not closed while it waited
            for _ in pieces:
                pass
        return result[0]

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        n_parallel: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[tuple[int, Completion]]:
        """Continue each of `prompts`, several at a time; yields (index, Completion) as they are finished.

        `n_parallel` of them are at work at once (default: the model's `n_sequences`); where one has ended, the next
        begins. What all prompts begin with is evaluated once. Takes the options of `generate`, and each completion is
        what `generate` would have given. With `n_draft`, tokens are drafted from what the text repeats: the same text,
        sooner. Raises BadRequestError, before anything runs, for a prompt that does not fit.
        """
        said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        how = options_of(**{**self._defaults(), **said})
        if how.grammar:
            check_grammar(how.grammar)
        tokens = [tuple(self._prompt(prompt)) for prompt in prompts]
        longest = max(map(len, tokens), default=0)
        if longest > self.n_ctx:
            raise BadRequestError(
                f"A prompt has {longest} tokens, but the context holds {self.n_ctx}; raise it with -c or cut it."
            )
        n = _common(tokens) if len(tokens) > 1 else 0
        n_prefix = n if n >= MIN_PREFIX else 0
        tasks = iter([Task(prompt=p, options=how, n_prefix=n_prefix, index=i) for i, p in enumerate(tokens)])
        batch = self.batch(self.placement.n_sequences if n_parallel is None else n_parallel)
        return ((done.task.index, done.completion) for done in self.serve(batch, lambda: next(tasks, None)))

    def batch(self, n_parallel: int, *, curve: BatchCurve | None = None, n_draft: int | None = None) -> Batch:
        """What runs several requests at once; `serve` feeds it. It drafts by `curve` (default: this model's own) up to
        `n_draft` tokens (default, and at most: what the model was loaded for)."""
        engine = self.engine
        n_draft = min(self.placement.n_draft if n_draft is None else n_draft, self.placement.n_draft)
        if curve is None and (n_draft or (n_parallel > 1 and engine.head is not None and engine.tail is not None)):
            curve = self.batch_curve()
        return Batch(
            engine,
            n_parallel,
            curve=curve,
            n_draft=n_draft,
            load_s=self._load_s,
            on_prefill=self._told_prefill(),
            cancelled=lambda: self._closing,
        )

    def batch_curve(self) -> BatchCurve:
        """What a step costs by the number of tokens in it, measured once for this model and machine and then kept."""
        with self._turns.queue, self._turns.begin(object()):
            return curve_of(self.engine)

    def serve(self, batch: Batch, supply: Callable[[], Task | None]) -> Iterator[Finished]:
        """The results of the tasks that `supply` gives until it has no more, in the order in which they end."""
        return self._in_turn(batch.run(supply))

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
        tokens = self.chat_tokens(messages)
        options["stop"] = [*stop_strings(options.get("stop")), *self.chat_template.stop]
        if stream:
            return self.generate(tokens, stream=True, **options)
        return self.generate(tokens, **options)

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that `chat` makes of these messages."""
        return encode_chat(self.chat_template, self.engine.vocabulary, messages)

    @property
    def chat_template(self) -> ChatTemplate:
        """The compiled chat template; says in `notes`, once, where it is not the model's own."""
        if self._template is None:
            self._template = compile_template(self.engine.vocabulary.chat_template, **self._template_tokens())
            if self._template.note:
                self._notes.append(self._template.note)
        return self._template

    def _template_tokens(self) -> dict[str, str]:
        vocabulary = self.engine.vocabulary
        return {"bos_token": _spelled(vocabulary, vocabulary.bos), "eos_token": _spelled(vocabulary, vocabulary.eos)}

    def save_state(self, path: str | Path) -> int:
        """Write what the context holds, KV caches and all, to a file, whole or not at all; returns its bytes.
        Raises OSError, and BadRequestError where the context is empty."""
        with self._turns.queue, self._turns.begin(object()):
            return save_state(self.engine, Path(path), self._store.identity)

    def restore_state(self, path: str | Path) -> int:
        """Replace the context by a saved one; returns its tokens, which prompts that begin with them reuse.
        Raises OSError, BadFileError where the file is damaged, BadRequestError where it is of another model, placement
        or version."""
        with self._turns.queue, self._turns.begin(object()):
            return restore_state(self.engine, Path(path), self._store.identity)

    def _told_prefill(self) -> Callable[[int, int], None] | None:
        """Who wants to know how far a prompt is read."""
        progress = self._progress
        return progress and (lambda done, total: progress("prompt", done / total))

    def _in_turn(self, pieces: Iterator[T]) -> Iterator[T]:
        """`pieces` one by one, the model free between them."""
        turn = self._turns.begin
        while True:
            assert self.engine  # not closed since, and in a forked process nobody would give it the turn
            with self._turns.queue, turn(pieces):
                assert self.engine  # not closed while it waited
                turn = self._turns.resume
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _pieces(
        self, tokens: list[int], options: Options, result: list[Completion], cancelled: Callable[[], bool]
    ) -> Generator[str, None, None]:
        completion = yield from generate(
            self.engine,
            tokens,
            options,
            load_s=self._load_s,
            cancelled=cancelled,
            on_prefill=self._told_prefill(),
        )
        result.append(completion)
        if not (options.grammar or options.edit_logits or options.is_over or options.on_token):
            self._remember(completion)

    def _remember(self, completion: Completion) -> None:
        """Add the speed, where it is the placement's alone, to the profile: `auto` rests on what was measured."""
        record = record_of(completion)
        if record is not None:
            self._store.add(record)


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all of them begin with."""
    return common_prefix(min(prompts), max(prompts))


def _spelled(vocabulary: Vocabulary, token: int) -> str:
    """How the vocabulary writes a token it may not have (-1)."""
    return vocabulary.text(token) if token >= 0 else ""
