"""Decode as recorded graphs: what the device does for a few tokens is recorded once, and replayed at every later step.

Launching a kernel takes the host some microseconds, and launching a graph of twenty hardly longer; in between, the
device would wait. `hybrid.head.segments` says what is recorded and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybrid.errors import HybridError
from hybrid.head.decoder import Block
from hybrid.head.kernels.formats import FEW_TOKENS
from hybrid.head.kv.bus import Moved
from hybrid.head.kv.cache import LayeredKVCache, Recorded
from hybrid.head.kv.layer import Stretch, UnrecordableError
from hybrid.head.linear import Workspace
from hybrid.head.recorder import Recorder, Replay
from hybrid.head.rope import Rotation
from hybrid.head.segments import Inputs, Segment, State, cut
from hybrid.model.spec import RopeSpec

MAX_SHAPES = 4
"""Shapes of steps that are recorded at a time; others are launched kernel by kernel."""
IDLE_STEPS = 64
"""Recorded steps after which a shape that none of them had gives way to another."""


class Graph:
    """Steps of one shape."""

    def __init__(self, shape: Sequence[Recorded], n_embd: int, device: torch.device) -> None:
        """`shape`: what the part of each stretch is recorded for."""
        self.inputs = Inputs(shape, n_embd, device)
        self.failure: Exception | None = None
        """Why it could not be recorded."""
        self.used = 0
        """The last step that it was."""
        self._pieces: list[Callable[[Sequence[Stretch]], None]] = []
        self._state = State(self.inputs.h, self.inputs.h)

    def record(
        self, blocks: Sequence[Block], cache: LayeredKVCache, recorder: Recorder, stretches: Sequence[Stretch]
    ) -> Tensor:
        """The first step, whose inputs have been written: each segment is launched, which compiles its kernels, then
        recorded and replayed. Where one cannot be recorded, the step ends all the same, without."""
        for piece in cut(blocks, cache, self.inputs):
            if isinstance(piece, Segment):
                self._segment(piece, recorder, cache.moved)
            else:
                self._pieces.append(partial(piece, self._state))
                piece(self._state, stretches)
        return self._state.h.clone()

    def replay(self, stretches: Sequence[Stretch]) -> Tensor:
        """A step, whose inputs have been written: the residual stream behind the last block, [n_tokens, n_embd]."""
        for piece in self._pieces:
            piece(stretches)
        return self._state.h.clone()

    def _segment(self, segment: Segment, recorder: Recorder, moved: Moved) -> None:
        recorded = copy(self._state)
        self._state = copy(self._state)
        segment(self._state)
        if self.failure is not None:
            return
        before = replace(moved)
        replay = _recorded(recorder, lambda: segment(recorded))
        if isinstance(replay, Exception):
            self.failure = replay
            return
        each = Moved(moved.to_device - before.to_device, moved.to_host - before.to_host)
        self._state = recorded

        def again(stretches: Sequence[Stretch]) -> None:
            replay()
            moved.add(each)

        self._pieces.append(again)


class Graphs:
    """The graphs of a head."""

    def __init__(
        self, blocks: Sequence[Block], cache: LayeredKVCache, recorder: Recorder, work: Workspace, notes: list[str]
    ) -> None:
        """`notes`: where to say what the user should know, a sentence each: what is not recorded."""
        self._blocks, self._cache, self._recorder, self._work, self._notes = blocks, cache, recorder, work, notes
        self._graphs: dict[tuple[Recorded, ...], Graph] = {}
        self._steps = 0
        self._unrecordable: set[tuple[int, ...]] = set()
        self._held: list[Tensor] = []
        self._off = False

    def takes(self, n_tokens: int) -> bool:
        """Whether steps of so many tokens may be recorded."""
        return not self._off and 1 <= n_tokens <= FEW_TOKENS

    def step(self, h: Tensor, rotations: Mapping[RopeSpec, Rotation], stretches: Sequence[Stretch]) -> Tensor | None:
        """h [n_tokens, n_embd], embeddings on the device, through all blocks; `rotations` lie on the host. None where
        such steps are not recorded, and nothing has been done. Raises BadRequestError as the cache does."""
        shape = self._cache.recorded_for(stretches)
        lengths = tuple(part.n for part in shape)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._use(graph)
            return graph.replay(graph.inputs.write(h, rotations, stretches))
        if lengths in self._unrecordable or not self._has_room():
            return None
        graph = Graph(shape, h.shape[1], h.device)
        located = graph.inputs.write(h, rotations, stretches)
        try:
            out = graph.record(self._blocks, self._cache, self._recorder, located)
        except UnrecordableError as error:
            self._cache.settle()
            for stretch in reversed(stretches):  # some layers have taken note of them
                self._cache.trim(stretch.seq, stretch.p0)
            self._unrecordable.add(lengths)
            self._say(f"in steps of {'+'.join(map(str, lengths))}: {error}")
            return None
        if graph.failure is None:
            self._graphs[shape] = graph
            self._use(graph)
            self._held.append(self._work.buffer)  # which may grow: the graph writes where it is now
        else:
            self._off = True
            self._graphs.clear()
            self._say(_reason(graph.failure))
        return out

    def _use(self, graph: Graph) -> None:
        self._steps += 1
        graph.used = self._steps

    def _has_room(self) -> bool:
        """Whether one more may be recorded; the one that has been idle longest makes room where it can."""
        if len(self._graphs) < MAX_SHAPES:
            return True
        oldest = min(self._graphs, key=lambda shape: self._graphs[shape].used)
        if self._steps - self._graphs[oldest].used < IDLE_STEPS:
            return False
        self._cache.settle()  # no replay of it is under way then
        del self._graphs[oldest]
        return True

    def _say(self, why: str) -> None:
        self._notes.append(f"Decode is launched kernel by kernel instead of as graphs, more slowly ({why}).")


class OutputGraphs:
    """The graphs of an output head, one for each number of rows."""

    def __init__(
        self,
        output: Callable[[Tensor], Tensor],
        n_most: int,
        recorder: Recorder,
        work: Workspace,
        notes: list[str],
    ) -> None:
        """`output`: hidden states [m, n_embd] to logits [m, n_vocab], m <= n_most; the rest as of `Graphs`."""
        self._output, self._recorder, self._work, self._notes = output, recorder, work, notes
        self._n_most = min(n_most, FEW_TOKENS)
        self._graphs: dict[int, tuple[Replay, Tensor, list[Tensor]]] = {}
        self._held: list[Tensor] = []

    def run(self, hidden: Tensor) -> Tensor | None:
        """hidden [m, n_embd] on the device to logits [m, n_vocab]. None where that is not recorded."""
        m = len(hidden)
        if m not in self._graphs and (not 1 <= m <= self._n_most or len(self._graphs) == MAX_SHAPES):
            return None
        if m not in self._graphs:
            return self._record(hidden.clone())
        replay, given, made = self._graphs[m]
        given.copy_(hidden)
        replay()
        return made[-1].clone()

    def _record(self, given: Tensor) -> Tensor:
        out, made = self._output(given), list[Tensor]()  # launched first: that compiles its kernels
        replay = _recorded(self._recorder, lambda: made.append(self._output(given)))
        if isinstance(replay, Exception):
            self._n_most = 0
            self._graphs.clear()
            why = _reason(replay)
            self._notes.append(f"The output head is launched kernel by kernel, more slowly ({why}).")
        else:
            self._graphs[len(given)] = replay, given, made
            self._held.append(self._work.buffer)
        return out


def _recorded(recorder: Recorder, run: Callable[[], None]) -> Replay | Exception:
    """What was recorded and replayed once, or why it could not be: drivers raise what they like."""
    try:
        replay = recorder.record(run)
        replay()
    except HybridError:
        raise
    except Exception as error:
        return error
    return replay


def _reason(error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")[:200]
    return f"{type(error).__name__}: {reason}"
