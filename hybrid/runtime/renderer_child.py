"""The process that renders templates (`hybrid.runtime.renderer`): two JSON lines in for a request, one out.

In: {"cpu_s", "memory_bytes"}, then {"source", "variables"} (without variables the template is only compiled). Out:
{"text"} or {"failed": why}. It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import IO

from jinja2 import Template

from hybrid.printable import printable
from hybrid.runtime.jinja import environment

KEPT_TEMPLATES = 8
SHOWN = 400
"""Characters of a template's own words that are passed on."""


def main() -> None:
    """Answer until there are no more requests."""
    limits, answers = sys.stdin.buffer, sys.stdout.buffer
    _confine()
    while line := limits.readline():
        _limit(**json.loads(line))
        answer = json.dumps(_answer(limits)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer)
        answers.flush()


def _confine() -> None:
    """No more files, no core dumps: should a template get out of its sandbox after all, there is little to find."""
    for source in ("{{ strftime_now('%d %B %Y') }}", "{{ raise_exception('') }}"):  # imports what rendering may need
        with suppress(Exception):
            environment().from_string(source).render()
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Of the request that comes: beyond its seconds the system ends this process (SIGPROF)."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _answer(requests: IO[bytes]) -> dict[str, str]:
    try:
        request = json.loads(requests.readline())
        template = _compiled(request["source"])
        variables = request.get("variables")
        return {"text": "" if variables is None else template.render(**variables)}
    except MemoryError:
        return {"failed": "it needs more memory than a template may take"}
    except Exception as e:  # whatever a template raises is its refusal
        return {"failed": _words(e)}


def _words(error: Exception) -> str:
    """What it says, as one short line that no terminal obeys."""
    return printable(" ".join(str(error).split())[:SHOWN]) or type(error).__name__


@lru_cache(KEPT_TEMPLATES)
def _compiled(source: str) -> Template:
    return environment().from_string(source)


if __name__ == "__main__":
    main()
