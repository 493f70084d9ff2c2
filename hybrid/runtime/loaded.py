"""A model that is loaded: its facts, its tokens and their logits, and its end."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from hybrid.errors import BadRequestError, HostMemoryError, OutOfMemoryError
from hybrid.model.file import ModelFile
from hybrid.model.spec import ModelSpec
from hybrid.runtime.arguments import plain_text, token_ids
from hybrid.runtime.engine import Engine
from hybrid.runtime.pipeline import Logits
from hybrid.runtime.turns import Turns
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import ProfileStore
from hybrid.schedule.scheduler import Plan, Request
from hybrid.schedule.step_down import one_layer_fewer
from hybrid.tail.preflight import preflight


class Loaded:
    """An open file and the engine that runs it, for `Hybrid`, whose constructor opens both."""

    _engine: Engine | None = None
    _file: ModelFile | None = None
    _turns: Turns
    _store: ProfileStore
    _notes: list[str]
    _progress: Callable[[str, float], None] | None
    _pid: int
    _closing: bool

    def _open(self, spec: ModelSpec, chosen: Plan, request: Request, auto: bool) -> Engine:
        """The engine of a plan. Where `auto` chose it and the device's memory is not there after all, with a layer
        fewer; the RAM would have to hold that layer, so that where it is the RAM that fails, this does not help."""
        assert self._file is not None
        self._notes += chosen.notes
        preflight(self._file, chosen.placement.n_gpu_layers, self._store.identity.machine)
        try:
            return Engine(self._file, spec, chosen.placement, progress=self._progress)
        except OutOfMemoryError as e:
            of_host = isinstance(e, HostMemoryError) and chosen.placement.device != "cpu"
            fewer = one_layer_fewer(spec, chosen, request) if auto and not of_host else None
            if fewer is None:
                raise
            k, tried = chosen.placement.n_gpu_layers, fewer.placement.n_gpu_layers
            self._notes.append(f"{k} layers did not fit after all, {tried} are tried ({e})")
        gc.collect()  # the exception, the frames it has seen and what they hold refer to each other
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()
        return self._open(spec, fewer, request, auto)

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
    def closed(self) -> bool:
        """Whether it was closed, and can no longer be used."""
        return self._engine is None

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

    def tokenize(self, text: str | bytes, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text` (bytes, as `llama_cpp.Llama` wants it, are UTF-8); `add_special` puts BOS (and EOS) where
        the model wants them. Text that looks like a control token stays text unless `parse_special`."""
        return self.engine.vocabulary.tokenize(plain_text(text), add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens left out."""
        return self.engine.vocabulary.detokenize(list(tokens))

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits after every token, [n_tokens, n_vocab] float32, from an empty context (which is left empty)."""
        self._check(tokens)
        with self._turns.queue, self._turns.begin(object()), (engine := self.engine).scoring():
            engine.trim(0)
            rows = engine.evaluate(list(tokens), outputs="all")
            engine.trim(0)
        assert rows is not None
        return rows

    def score(self, tokens: Sequence[int], see: Callable[[int, Logits], None]) -> None:
        """As `logits`, without holding all of them: `see(i, row)` gets the logits [n_vocab] after each token."""
        step = self.placement.n_batch
        self._check(tokens)
        with self._turns.queue, self._turns.begin(object()), (engine := self.engine).scoring():
            engine.trim(0)
            for start in range(0, len(tokens), step):
                rows = engine.evaluate(list(tokens[start : start + step]), outputs="all")
                assert rows is not None
                for i, row in enumerate(rows, start):
                    see(i, row)
            engine.trim(0)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free both halves and the file; a request of another thread is interrupted first. Calling it again does
        nothing; nor does it where the model was loaded in another process, which goes on using it."""
        if self._file is None or os.getpid() != self._pid:
            return
        self._closing = True
        engine = self._engine  # another thread may be closing it, too
        if engine is not None:
            engine.interrupt()
        with self._turns.queue, self._turns.begin(self):
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._file.close()

    def __enter__(self) -> Self:
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

    # -- inside --------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int]) -> None:
        n_vocab = self.engine.vocabulary.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise BadRequestError(f"Token {token} is not in this model's vocabulary of {n_vocab}.")
        if not tokens:
            raise BadRequestError("The prompt is empty.")

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt's token ids. Raises BadRequestError for one that is none."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else token_ids(prompt)
        self._check(tokens)
        return tokens
