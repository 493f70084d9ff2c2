"""Planning: candidates, the choice between them, and what `hybrid plan` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid.apps.plan import PlanRequest, make_plan, meets
from hybrid.errors import BadRequestError, OutOfMemoryError
from hybrid.model.spec import ModelSpec
from hybrid.schedule import auto, facts, scheduler
from hybrid.schedule.budget import VRAM_RESERVE
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.machine import Gpu, Machine
from hybrid.schedule.placement import KV_STRATEGIES
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.scheduler import Request, plan
from hybrid.schedule.shape import parse_shape, shape_spec
from tests.tiny import write_tiny

MIB, GIB = 1 << 20, 1 << 30
LLAMA_3_8B = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))
RTX3070TI = assumed_machine("rtx3070ti")


def request(n_ctx: int = 8192, **other: Any) -> PlanRequest:
    return PlanRequest(n_ctx=n_ctx, **other)


def most_layers(n_ctx: int = 8192, machine: Machine = RTX3070TI, **other: Any) -> int:
    """The most layers that fit with K and V beside them."""
    report = make_plan(LLAMA_3_8B, machine, request(n_ctx, **other))
    return max(c.placement.n_gpu_layers for c in report.candidates if c.fits and c.placement.kv == "device")


def test_every_split_and_every_strategy_is_a_candidate() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request())
    device = [c.placement.n_gpu_layers for c in report.candidates if c.placement.kv == "device"]
    assert device == list(range(33))
    assert {c.placement.kv for c in report.candidates} == set(KV_STRATEGIES)


def test_more_context_sequences_or_reserve_never_gives_more_layers() -> None:
    assert most_layers(32768) <= most_layers(16384) <= most_layers(4096)
    assert most_layers(n_sequences=4) <= most_layers(n_sequences=2) <= most_layers()
    assert most_layers(vram_reserve=5 * GIB) < most_layers(vram_reserve=0)


def test_the_reserve_is_left_to_the_desktop_unless_a_budget_is_given() -> None:
    total = 8 * GIB
    assert make_plan(LLAMA_3_8B, RTX3070TI, request()).budget.vram_bytes == total - VRAM_RESERVE
    assert make_plan(LLAMA_3_8B, RTX3070TI, request(vram_reserve=GIB)).budget.vram_bytes == total - GIB
    assert make_plan(LLAMA_3_8B, RTX3070TI, request(vram_bytes=3 * GIB)).budget.vram_bytes == 3 * GIB


def test_what_does_not_fit_says_which_memory_lacks_how_much() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request(vram_bytes=3 * GIB))
    for candidate in report.candidates:
        if candidate.placement.kv == "device" and not candidate.fits:
            assert "of VRAM too little" in candidate.reason
            assert candidate.ledger.vram_bytes > 3 * GIB
    poor = replace(RTX3070TI, memory=replace(RTX3070TI.memory, total_bytes=2 * GIB, available_bytes=2 * GIB))
    report = make_plan(LLAMA_3_8B, poor, request())
    zero = report.candidates[0]
    assert not zero.fits
    assert "of RAM too little" in zero.reason


def test_a_budget_smaller_than_one_layer_says_what_the_smallest_is() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request(vram_bytes=10 * MIB))
    assert most_layers(vram_bytes=10 * MIB) == 0
    (line,) = [note for note in report.notes if "smallest budget" in note]
    smallest = int(line.split("is ")[-1].split(" MiB")[0].replace(",", "")) * MIB
    assert most_layers(vram_bytes=smallest) == 1
    assert most_layers(vram_bytes=smallest - MIB) == 0


def test_the_offload_family_takes_all_layers_where_their_weights_fit() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request(131072))
    assert most_layers(131072) < 32
    for kv in ("stream", "attend", "tiered"):
        (candidate,) = [c for c in report.candidates if c.placement.kv == kv]
        assert candidate.fits
        assert candidate.placement.n_gpu_layers > most_layers(131072)
    tiered = report.candidates[-1]
    assert tiered.placement.kv_budget is not None
    assert report.budget.vram_bytes is not None
    assert tiered.ledger.vram_bytes <= report.budget.vram_bytes


def test_the_best_can_run_and_no_other_that_can_is_quicker() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request())
    assert report.best is not None
    for candidate in report.candidates:
        if candidate.runnable:
            assert candidate.tpot_s[4096] >= report.best.tpot_s[4096]
    assert report.best.available


def test_without_a_gpu_the_cpu_is_used_and_emulated_splits_are_marked() -> None:
    report = make_plan(LLAMA_3_8B, assumed_machine("cpu"), request())
    assert report.best is not None
    assert report.best.placement.n_gpu_layers == 0
    assert all(c.ledger.emulated for c in report.candidates[1:])


def test_tpot_gives_the_longest_context_that_is_quick_enough_and_fits() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request(tpot_s=0.05))
    assert report.best is not None
    assert meets(report.best, 0.05)
    assert report.advice == ()
    longest = report.best.longest_context
    assert longest is not None
    again = make_plan(LLAMA_3_8B, RTX3070TI, request(longest, tpot_s=0.05))
    same = next(c for c in again.candidates if c.placement.n_gpu_layers == report.best.placement.n_gpu_layers)
    assert same.fits
    assert meets(same, 0.05)
    assert report.candidates[0].longest_context == 0  # the CPU alone never is


def test_advice_is_tried_before_it_is_given() -> None:
    q8 = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128,quant=Q8_0"))
    report = make_plan(q8, RTX3070TI, request(16384, n_sequences=2, tpot_s=0.05))
    assert report.best is not None
    assert not meets(report.best, 0.05)
    text = " ".join(report.advice)
    assert "Nothing takes 50 ms" in text
    assert "bits a weight and a q8_0 KV cache" in text
    assert "retriev" in text
    n_ctx = int(text.split("(-c ")[1].split(")")[0])
    shorter = make_plan(q8, RTX3070TI, request(n_ctx, n_sequences=2, tpot_s=0.05))
    assert shorter.best is not None
    assert meets(shorter.best, 0.05)


def test_where_nothing_fits_that_is_said() -> None:
    poor = replace(RTX3070TI, gpus=(), memory=replace(RTX3070TI.memory, total_bytes=GIB, available_bytes=GIB))
    report = make_plan(LLAMA_3_8B, poor, request())
    assert report.best is None
    assert report.advice[0] == "Nothing fits."


def test_fewer_sequences_are_advised_where_they_would_fit() -> None:
    report = make_plan(LLAMA_3_8B, RTX3070TI, request(n_sequences=10_000))
    assert report.best is None
    (line,) = (line for line in report.advice if "--sequences" in line)
    fewer = int(line.split()[0])
    assert make_plan(LLAMA_3_8B, RTX3070TI, request(n_sequences=fewer)).best is not None
    assert not any("nothing else" in line for line in report.advice)


def test_less_ram_than_the_system_needs_is_none_and_not_less() -> None:
    poor = replace(RTX3070TI, memory=replace(RTX3070TI.memory, total_bytes=1, available_bytes=1))
    assert make_plan(LLAMA_3_8B, poor, request()).budget.ram_bytes == 0


def test_a_context_longer_than_trained_is_warned_of() -> None:
    assert any("trained for" in note for note in make_plan(LLAMA_3_8B, RTX3070TI, request(200_000)).notes)
    with pytest.raises(BadRequestError):
        make_plan(LLAMA_3_8B, RTX3070TI, request(0))


def test_no_context_is_advised_that_the_model_was_not_trained_for() -> None:
    trained = replace(LLAMA_3_8B, n_ctx_train=8192)
    report = make_plan(trained, RTX3070TI, request(100_000_000))
    assert report.best is None
    assert "A context of 8192 tokens would do (-c 8192)." in report.advice
    less = make_plan(replace(LLAMA_3_8B, n_ctx_train=1 << 20), RTX3070TI, request(100_000_000))
    (line,) = (line for line in less.advice if line.startswith("A context of"))
    assert 8192 < int(line.split()[3]) < 1 << 20


# -- auto --------------------------------------------------------------------------------------------------------------


def with_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A machine with a GPU that torch would find, and RAM enough."""
    gpu = Gpu(device="cuda:0", name="Card", total_bytes=8 * GIB, free_bytes=free)
    monkeypatch.setattr(facts, "gpus", lambda: (gpu,))
    monkeypatch.setattr(scheduler, "default_device", lambda: "cuda")
    for module in (scheduler, auto):
        monkeypatch.setattr(module, "ram_budget", lambda: 64 * GIB)
    monkeypatch.setattr(scheduler, "available_ram", lambda: 64 * GIB)


@pytest.mark.parametrize("free", [1 * GIB, 3 * GIB, 5 * GIB, 8 * GIB])
def test_auto_takes_what_fits_and_says_why(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    with_gpu(monkeypatch, free)
    chosen = plan(LLAMA_3_8B, Request(n_ctx=4096))
    k = chosen.placement.n_gpu_layers
    expected = most_layers(4096, vram_bytes=free - VRAM_RESERVE)
    assert k == expected
    (line,) = [note for note in chosen.notes if "layers on cuda" in note]
    assert line.startswith(f"{k} of 32 layers on cuda")
    assert f"{free / GIB:.1f} GiB free" in line


def test_auto_never_takes_more_layers_for_more_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 5 * GIB)
    layers = [plan(LLAMA_3_8B, Request(n_ctx=n)).placement.n_gpu_layers for n in (1024, 4096, 16384, 65536)]
    assert layers == sorted(layers, reverse=True)
    assert layers[0] > layers[-1]


def test_a_context_that_the_ram_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scheduler, auto):
        monkeypatch.setattr(module, "ram_budget", lambda: 4 * GIB)
    with pytest.raises(OutOfMemoryError) as error:
        plan(LLAMA_3_8B, Request(n_gpu_layers=0, n_ctx=65536))
    assert "margin" in str(error.value)
    mapped = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128,quant=Q6_K"))
    assert sum(layer.weight_bytes for layer in mapped.layers) > 4 * GIB
    chosen = plan(mapped, Request(n_gpu_layers=0, n_ctx=4096))  # a file that is only mapped may be larger than the RAM
    assert any("read from the disk at every token" in note for note in chosen.notes)


# -- the command -------------------------------------------------------------------------------------------------------

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("plan", …)` in an environment with no memory of measurements."""
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hybrid.cli", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)

    return call


def test_json_of_the_streamed_llama_3_8b(run: Run) -> None:
    shape, a100 = "layers=32,kv_heads=8,head_dim=128", "a100-pcie4"
    done = run("plan", "--shape", shape, "--machine", a100, "-c", "128000", "--sequences", "4", "--json")
    assert done.returncode == 0, done.stderr
    facts_ = json.loads(done.stdout)
    assert facts_["assumed"]
    (stream,) = [c for c in facts_["candidates"] if c["placement"]["kv"] == "stream"]
    assert stream["kv_transfer_s_per_token"] == pytest.approx(4 * 0.524288)
    assert stream["per_layer_transfer_s"]["pcie"] == pytest.approx(4 * 16.384e-3)
    assert stream["kv_bytes"] == 4 * 16_777_216_000
    assert set(stream["tpot_s"]) == {"0", "64000", "128000"}
    for key in ("fits", "vram_bytes", "ram_bytes", "reason", "ttft_s"):
        assert key in stream


def test_a_plan_imports_neither_torch_nor_llama_cpp(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=2)
    code = (
        "import sys; from hybrid.cli.app import commands;"
        f"commands.main(['plan', {str(model)!r}, '--json'], standalone_mode=False);"
        "assert not {'torch', 'llama_cpp', 'numpy'} & set(sys.modules), 'too much was imported'"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    facts_ = json.loads(done.stdout)
    assert facts_["candidates"][0]["placement"]["n_gpu_layers"] == 0


def test_the_table_for_people(run: Run) -> None:
    done = run(
        "plan", "--shape", "layers=32,kv_heads=8,head_dim=128", "--machine", "rtx3070ti", "-c", "8192",
        "--tpot", "50ms", "-b", "64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "assumed" in done.stdout
    assert "best" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Use: -ngl"))
    assert "-c 8192" in line
    assert "-b 64" in line
    assert "may be off by" in done.stdout
    assert "not measured" not in done.stdout.split("\n")[1]


def test_the_table_fits_80_columns_and_what_does_not_fit_is_exit_code_2(run: Run) -> None:
    shape = ["--shape", "layers=32,kv_heads=8,head_dim=128", "--machine", "rtx3070ti", "--tpot", "50ms"]
    done = run("plan", *shape, "-c", "65536")
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("\n\n")[1].splitlines()
    assert sum("VRAM short" in line for line in table) > 3
    assert all(line.split()[0].isdecimal() for line in table[1:]), "a line a placement"
    assert max(len(line.rstrip()) for line in table) < 80
    done = run("plan", *shape, "-c", "100000000")
    assert done.returncode == 2
    assert done.stderr.startswith("hybrid: Nothing fits (")
    assert len(done.stderr.splitlines()) == 1
    assert "A context of" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shape", "layers=x"], "layers"),
        (["--shape", "layers=2000000000"], "layers"),
        (["--shape", f"layers={'9' * 5000}"], "layers"),
        (["--shape", "kv_heads=0"], "kv_heads"),
        (["--shape", "layers=2", "--device", "bogus"], "bogus"),
        (["--shape", "layers=2", "--vram", "9" * 400], "amount of memory"),
        (["--shape", "layers=2", "--machine", "abacus"], "abacus"),
        (["--vram", "lots"], "lots"),
        (["--tpot", "0ms"], "0ms"),
        (["-c", "0"], "0"),
        (["model.gguf", "--shape", "layers=2"], "not both"),
        (["missing.gguf"], "missing.gguf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run: Run, arguments: list[str], named: str) -> None:
    done = run("plan", *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_assumed_machines_are_listed_and_shown(run: Run) -> None:
    names = json.loads(run("machine", "--list", "--json").stdout)
    assert "rtx3070ti" in names
    shown = json.loads(run("machine", "--machine", "rtx3070ti", "--json").stdout)
    assert shown["assumed"]
    assert shown["gpus"][0]["total_bytes"] == 8 * GIB
    assert "8.0 GiB" in run("machine", "--machine", "rtx3070ti").stdout


def test_this_machine_is_measured_once_and_plans_use_it(run: Run) -> None:
    first, second = (json.loads(run("machine", "--json").stdout) for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["rates"] == second["rates"]
    planned = json.loads(run("plan", "--shape", "layers=2", "--json").stdout)
    assert not planned["assumed"]
    assert not any("not measured yet" in note for note in planned["notes"])


def test_units() -> None:
    from hybrid.cli.units import Bytes, Seconds

    size = {"128MiB": 128 * MIB, "6g": 6 * GIB, "1.5 GB": 3 * GIB // 2, "4096": 4096, "2 KiB": 2048}
    assert {text: Bytes().convert(text, None, None) for text in size} == size
    times = {"50ms": 0.05, "1.5s": 1.5, "2": 2.0, "2min": 120.0}
    assert {text: Seconds().convert(text, None, None) for text in times} == pytest.approx(times)


def test_a_model_that_cannot_be_split_has_one_candidate() -> None:
    spec: ModelSpec = replace(LLAMA_3_8B, unsupported="it is a test")
    report = make_plan(spec, RTX3070TI, request())
    assert [c.placement.n_gpu_layers for c in report.candidates] == [0]
    assert any("it is a test" in note for note in report.notes)


def test_as_many_sequences_as_fit_beside_one_and_the_note_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(free: int, **more: Any) -> tuple[int, str]:
        for module in (scheduler, auto):
            monkeypatch.setattr(module, "ram_budget", lambda: free)
        made = plan(LLAMA_3_8B, Request(n_gpu_layers=0, n_ctx=8192, n_sequences="auto", **more))
        one = plan(LLAMA_3_8B, Request(n_gpu_layers=0, n_ctx=8192))
        assert replace(made.placement, n_sequences=1) == one.placement  # nothing else gives way
        return made.placement.n_sequences, made.notes[-1]

    need = ledger_of(LLAMA_3_8B, plan(LLAMA_3_8B, Request(n_gpu_layers=0, n_ctx=8192)).placement).ram_bytes
    assert chosen(need + 64 * MIB)[0] == 1
    n, note = chosen(need + 2 * GIB + 512 * MIB)  # a sequence takes 1 GiB
    assert n == 3
    assert note == "3 sequences at a time, as many as fit: 3,072 MiB of KV cache."
    assert chosen(1000 * GIB)[0] == 8
    assert chosen(1000 * GIB, most_sequences=5)[0] == 5


def test_a_narrow_terminal_cuts_no_figure_and_no_word() -> None:
    import io

    from rich.console import Console

    from hybrid.cli.tables import figures, say, show

    table = figures("-ngl", "RAM")
    table.add_row("30", "1,234,567,890 MiB", "a few words at the end")
    drawn = io.StringIO()
    console = Console(file=drawn, width=20, force_terminal=True, color_system=None, soft_wrap=True)
    show(console, table)
    assert "30 1,234,567,890 MiB a few words at the end" in drawn.getvalue()
    say(console, "There is no GPU: figures are an emulated one's.")
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    assert lines[-3:] == ["There is no GPU:", "figures are an", "emulated one's."]
    piped = io.StringIO()
    say(Console(file=piped, width=20), "There is no GPU: figures are an emulated one's.")
    assert piped.getvalue().count("\n") == 1
