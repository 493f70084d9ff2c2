"""Coverage-guided fuzzing (atheris) of all that reads a model file before llama.cpp does.

    python -m scripts.fuzz_reader                          # an hour
    python -m scripts.fuzz_reader --seconds 60 --corpus build/fuzz/reader

The corpus begins with tiny models of every architecture that can be split, and grows by what reaches new code; a second
run goes on with it. One input in five is a model spoilt on purpose, the others are changed byte by byte. Anything but
a result or one of our own errors ends the run with exit code 77 and leaves the input beside the corpus, ready for
`tests/fuzz/read`.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from random import Random

import atheris
import click

# An editable install finds modules by a hook of its own, which atheris cannot instrument: it is asked last, for what
# is not a file of the checkout (the native module).
sys.meta_path.sort(key=lambda finder: "Redirecting" in type(finder).__name__)
with atheris.instrument_imports(include=["hybrid"]):
    from tests.fuzz.cases import bases
    from tests.fuzz.reading import ModelFile, read, seeds, small, spoilt, write

LONGEST = 1 << 15
"""Bytes of an input; seeds have 2,000 to 7,000."""
SPOILT_SHARE = 0.2
LIMIT_MIB = 1024


@click.command()
@click.option("--seconds", default=3600, show_default=True, help="How long.")
@click.option("--corpus", type=click.Path(path_type=Path), default=Path("build/fuzz/reader"), show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the random numbers; 0: another one each time.")
def main(seconds: int, corpus: Path, seed: int) -> None:
    """Fuzz, and print libFuzzer's figures. Exits with 0 where nothing was found."""
    if "__ATHERIS_INSTRUMENTED__" not in ModelFile.__init__.__code__.co_consts:
        raise SystemExit("atheris has not instrumented hybrid: without coverage this would be guessing.")
    folder = corpus.with_name("scratch")  # not a temporary one: libFuzzer ends the process without Python's clean-up
    for made in (corpus, folder):
        made.mkdir(parents=True, exist_ok=True)
    layouts = [small(layout) for layout in bases(folder).values()]
    for data in seeds(layouts):
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < SPOILT_SHARE:
            return spoilt(layouts, random)[:most]
        return atheris.Mutate(data, min(most, LONGEST))

    def one(data: bytes) -> None:
        read(write(data, folder))

    options = {"max_total_time": seconds, "seed": seed, "max_len": LONGEST}
    options |= {"rss_limit_mb": LIMIT_MIB, "print_final_stats": 1, "artifact_prefix": f"{corpus}-found-"}
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
