"""Whatever is wrong with a file, the program ends soon, with exit code 0 or 2 and at most one sentence."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz.cases import FAILED, Case, bases, drawn
from tests.fuzz.layout import Layout
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.runner import LIMIT_BYTES, LIMIT_S, Runner, problem_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runner waits on a pidfd")
REDUCED = 100
KEPT = [Case.from_json(line) for line in FAILED.read_text().splitlines()]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("fuzz")) as runner:
        yield runner


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layout]:
    return bases(tmp_path_factory.mktemp("bases"))


def test_a_sound_file_survives_being_taken_apart(layouts: dict[str, Layout], runner: Runner) -> None:
    done = Case("llama", [], ["generate", "-ngl", "1", "--device", "cpu", "-p", "a", "-n", "1"]).run(
        runner, layouts["llama"]
    )
    assert (done.code, done.problem) == (0, "")


def test_spoilt_files_end_in_a_result_or_a_sentence(layouts: dict[str, Layout], runner: Runner) -> None:
    """`make fuzz` runs twenty times as many."""
    codes = set()
    for case in itertools.islice(drawn(layouts, seed=1), REDUCED):
        done = case.run(runner, layouts[case.base])
        assert not done.problem, (done, case.to_json())
        codes.add(done.code)
    assert codes == {0, 2}


@pytest.mark.parametrize("case", KEPT, ids=lambda case: f"{case.base}-{'-'.join(m[0] for m in case.mutations)}")
def test_what_once_did_harm_does_none_any_more(layouts: dict[str, Layout], runner: Runner, case: Case) -> None:
    done = case.run(runner, layouts[case.base])
    assert not done.problem, done


def test_every_way_to_spoil_a_file_is_drawn(layouts: dict[str, Layout]) -> None:
    cases = itertools.islice(drawn(layouts, seed=0), 3000)
    assert {mutation[0] for case in cases for mutation in case.mutations} == set(MUTATIONS)


@pytest.mark.parametrize(
    ("result", "words", "problem"),
    [
        ((0, 1.0, 0), "text", ""),
        ((2, 1.0, 0), "hybrid: A sentence.", ""),
        ((2, 1.0, 0), "A sentence.", "no sentence"),
        ((2, 1.0, 0), "hybrid: One.\nhybrid: Two.", "more than one"),
        ((2, 1.0, 0), "hybrid: A\x1b[2J.", "control characters"),
        ((2, 1.0, 0), "Traceback (most recent call last)\nhybrid: One.", "a traceback"),
        ((1, 1.0, 0), "hybrid: Something unforeseen.", "exit code 1"),
        ((-6, 1.0, 0), "GGML_ASSERT", "SIGABRT"),
        ((None, 30.0, 0), "", "hung"),
        ((0, LIMIT_S + 1, 0), "", "it took"),
        ((0, 1.0, LIMIT_BYTES + 1), "", "it held"),
    ],
)
def test_what_no_run_may_do_is_told(result: tuple[int | None, float, int], words: str, problem: str) -> None:
    found = problem_of(*result, words)
    assert problem in found
    assert bool(problem) == bool(found)
