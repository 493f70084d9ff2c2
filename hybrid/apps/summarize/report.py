"""What a summary took, and whether all of the document was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid.apps.summarize.work import Answer


@dataclass
class Phase:
    """All jobs of one kind: `single`, `map`, `reduce`, `refine` or `combine`."""

    jobs: int = 0
    from_checkpoint: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, answer: Answer, *, from_checkpoint: bool) -> None:
        """Count an answer; seconds are those of the run that made it."""
        self.jobs += 1
        self.from_checkpoint += from_checkpoint
        self.prompt_tokens += answer.n_prompt
        self.reused_tokens += answer.n_cached
        self.generated_tokens += answer.n_generated
        self.prefill_s += answer.prefill_s
        self.decode_s += answer.decode_s
        self.drafted_tokens += answer.n_drafted
        self.accepted_tokens += answer.n_accepted

    def to_dict(self) -> dict[str, Any]:
        """The counts, and the two speeds in tokens per second."""
        return {
            **asdict(self),
            "prefill_tok_per_s": _rate(self.prompt_tokens - self.reused_tokens, self.prefill_s),
            "decode_tok_per_s": _rate(self.generated_tokens, self.decode_s),
        }


@dataclass
class Report:
    """The record of one summary. `to_dict` is what --json prints beside the text."""

    name: str = ""
    format: str = "text"
    encoding: str | None = None
    sha256: str = ""
    model: str = ""
    strategy: str = ""
    n_tokens: int = 0
    """Tokens of the document."""
    n_tokens_read: int = 0
    """Those of them that the model evaluated, repeated ones not counted."""
    n_tokens_overlap: int = 0
    """Tokens read again because chunks overlap."""
    overlap: int = 0
    """The most tokens that two chunks share."""
    n_chunks: int = 0
    n_levels: int = 0
    """1: the document alone was read; each merging of summaries adds one."""
    levels: list[dict[str, int]] = field(default_factory=list)
    phases: dict[str, Phase] = field(default_factory=dict)
    flagged: list[dict[str, Any]] = field(default_factory=list)
    """Answers that were empty or looping: the job, the problem, and whether the retry mended it."""
    truncated: bool = False
    """Whether the final text was cut off at its token limit; it then ends with its last whole sentence and "[…]"."""
    complete: bool = True
    """False where the summaries did not get shorter any more, and the text is several of them."""
    wall_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def share_read(self) -> float:
        """1.0 when every token was read."""
        return self.n_tokens_read / self.n_tokens if self.n_tokens else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {
            "document": {
                "name": self.name,
                "format": self.format,
                "encoding": self.encoding,
                "sha256": self.sha256,
                "tokens": self.n_tokens,
                "tokens_read": self.n_tokens_read,
                "share_read": self.share_read,
            },
            "model": self.model,
            "strategy": self.strategy,
            "chunks": self.n_chunks,
            "overlap": {"limit": self.overlap, "tokens": self.n_tokens_overlap},
            "levels": self.levels,
            "n_levels": self.n_levels,
            "phases": {name: phase.to_dict() for name, phase in self.phases.items()},
            "flagged": self.flagged,
            "truncated": self.truncated,
            "complete": self.complete,
            "wall_s": self.wall_s,
            "options": dict(self.options),
            "placement": dict(self.placement),
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """The same for a person, a few lines."""
        saved = sum(phase.from_checkpoint for phase in self.phases.values())
        out = [
            f"{self.name}: read {self.n_tokens_read} of {self.n_tokens} tokens ({self.share_read:.0%}) in "
            f"{_count(self.n_chunks, 'chunk')}, {_count(self.n_levels, 'level')}, {self.strategy}; "
            f"{_duration(self.wall_s)}" + (f"; {_count(saved, 'answer')} from the interrupted run" if saved else "")
        ]
        if self.n_tokens_overlap:
            out.append(f"  chunks overlap by up to {self.overlap} tokens, {self.n_tokens_overlap} in all")
        for name, phase in self.phases.items():
            rates = phase.to_dict()
            out.append(
                f"  {name}: {_count(phase.jobs, 'prompt')}, {phase.prompt_tokens} tokens in"
                f"{_speed(rates['prefill_tok_per_s'])} ({phase.reused_tokens} reused), "
                f"{phase.generated_tokens} out{_speed(rates['decode_tok_per_s'])}"
                + (f" ({phase.accepted_tokens} of {phase.drafted_tokens} guesses right)" * (phase.drafted_tokens > 0))
            )
        for flag in self.flagged:
            end = "the second try was fine" if flag["mended"] else "so was the second try; look at the result with care"
            out.append(f"  {flag['job']}: the first answer was {flag['problem']}; {end}")
        if self.truncated:
            out.append("  the summary was cut off at its token limit and ends with […]; --length asks for a longer one")
        return out + [f"  {note}" for note in self.notes]


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _speed(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:.0f}/s" if rate >= 10 else f" at {rate:.1f}/s"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (
        f"{hours} h {minutes:02} min"
        if hours
        else f"{minutes} min {whole % 60:02} s"
        if minutes
        else f"{seconds:.1f} s"
    )
