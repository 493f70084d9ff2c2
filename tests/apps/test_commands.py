"""The command that a tuning recommends runs exactly what was measured."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import replace
from typing import Any

import click
import pytest

from hybrid.apps.commands import arguments, command
from hybrid.cli.options import PLACEMENT, pick
from hybrid.model.spec import ModelSpec
from hybrid.schedule import own_offload
from hybrid.schedule.limits import usable_cores
from hybrid.schedule.placement import Placement
from hybrid.schedule.scheduler import Request, plan
from hybrid.schedule.shape import parse_shape, shape_spec
from hybrid.schedule.shares import with_batch, with_threads

SPEC = shape_spec(parse_shape("layers=6,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
BASE = Placement(device="cpu", n_gpu_layers=3, n_ctx=1024)


def planned(line: str, spec: ModelSpec) -> Placement:
    """The placement that typing the line gives."""
    words = shlex.split(line)
    assert words[0] == "hybrid"
    parser: click.Command = importlib.import_module(f"hybrid.cli.{words[1]}").command
    options = parser.make_context(words[1], words[2:]).params
    asked: dict[str, Any] = pick(PLACEMENT, options)
    if "parallel" in options:
        asked |= {"n_sequences": options["parallel"], "n_draft": options["speculate"]}
    return plan(spec, Request(**asked)).placement


def at(**fields: Any) -> Placement:
    """A placement as a tuning makes it, with some fields of its own."""
    threads = fields.pop("threads", usable_cores())
    sizes = {name: fields.pop(name, None) for name in ("n_batch", "n_ubatch")}
    p = with_batch(replace(BASE, **fields), SPEC, sizes["n_batch"], sizes["n_ubatch"])
    return with_threads(p, SPEC, threads)


FIELDS: list[dict[str, Any]] = [
    {},
    {"n_gpu_layers": 0, "device": "cpu"},
    {"n_gpu_layers": 6},
    {"n_batch": 64},
    {"n_batch": 512},
    {"n_gpu_layers": 6, "n_batch": 128},
    {"n_batch": 256, "n_ubatch": 32},
    {"threads": usable_cores() + 3},
    {"kv": "attend", "kv_dtype": "q8_0"},
    {"kv": "stream", "kv_keep_sliding": False},
    {"kv": "tiered", "kv_budget": 3_000_000, "n_batch": 32},
    {"n_sequences": 4, "n_batch": 64},
    {"n_sequences": 2, "n_draft": 5, "kv_dtype": "f32"},
    {"n_sequences": 3, "n_gpu_layers": 0},
]
"""In which a placement may differ from one that is as by default."""


@pytest.mark.parametrize("fields", FIELDS)
def test_the_command_gives_the_placement_back(fields: dict[str, Any]) -> None:
    p = at(**fields)
    assert planned(command("my model.gguf", p, SPEC), SPEC) == p


@pytest.mark.parametrize("fields", [fields for fields in FIELDS if "n_sequences" not in fields])
def test_the_arguments_give_it_back_too_whatever_a_chat_was_started_with(fields: dict[str, Any]) -> None:
    started = {"n_gpu_layers": 2, "device": "cpu", "n_ctx": 77, "n_batch": 48, "n_ubatch": 16, "n_threads": 9}
    started |= {"kv": "tiered", "kv_dtype": "bf16", "kv_budget": 1_000_000, "kv_keep_sliding": False}
    p = at(**fields)
    assert plan(SPEC, Request(**{**started, **arguments(p)})).placement == p


def test_what_is_as_by_default_is_not_spelled_out() -> None:
    assert command("m.gguf", at(), SPEC) == "hybrid chat m.gguf -ngl 3 -c 1024 --device cpu"
    assert command("m.gguf", at(n_gpu_layers=0), SPEC) == "hybrid chat m.gguf -ngl 0 -c 1024"


def test_llama_cpps_own_layers_are_asked_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_offload, "supports_offload", lambda: True)
    for own, offload_kqv in ((2, True), (7, True), (7, False)):
        p = at(n_gpu_layers=0, llama_gpu_layers=own, offload_kqv=offload_kqv)
        line = command("m.gguf", p, SPEC)
        assert "--engine llama.cpp" in line
        assert planned(line, SPEC) == p
        assert plan(SPEC, Request(**arguments(p))).placement == p
