"""Machines: measured, remembered, assumed."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid import _native
from hybrid.errors import BadRequestError
from hybrid.schedule import facts, machine_store, probe
from hybrid.schedule.machine import Machine
from hybrid.schedule.nvml import UNKNOWN, nvidia_gpus
from hybrid.schedule.presets import RATES, assumed_machine, preset_names, preset_tables

GB = 10**9


class FakeNvml:
    """Two cards; on the first a browser and a process whose memory the driver hides."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free = 8 * GB, (3 if handle.value == 1 else 8) * GB
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:  # noqa: N802
        name.value = b"Card %d" % handle.value
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        count._obj.value = 2 if handle.value == 1 else 0
        processes[0].pid, processes[0].used = 11, UNKNOWN
        processes[1].pid, processes[1].used = 12, 2 * GB
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, generation: Any) -> int:  # noqa: N802
        generation._obj.value = 4
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, lanes: Any) -> int:  # noqa: N802
        lanes._obj.value = 16
        return 0


def test_nvml_tells_memory_users_and_link(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "comm").write_text("browser\n")
    first, second = nvidia_gpus(FakeNvml(), tmp_path)
    assert (first.device, first.name, first.total_bytes, first.free_bytes) == ("cuda:0", "Card 1", 8 * GB, 3 * GB)
    assert first.pcie == "4.0 x16"
    assert [(user.pid, user.name, user.n_bytes) for user in first.users] == [(12, "browser", 2 * GB), (11, "?", None)]
    assert (second.device, second.free_bytes, second.users, second.pcie) == ("cuda:1", 8 * GB, (), "")


def test_a_driver_that_does_not_answer_is_no_gpu() -> None:
    class Broken:
        def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
            return 999

    assert nvidia_gpus(Broken()) == ()


def test_nvml_structures_have_the_sizes_of_its_header() -> None:
    from hybrid.schedule.nvml import _Memory, _Process

    assert (ctypes.sizeof(_Memory), ctypes.sizeof(_Process)) == (24, 24)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_every_figure_has_a_source(name: str) -> None:
    machine = assumed_machine(name)
    assert machine.assumed
    assert "assumed" in machine.notes[0]
    assert machine.sources
    assert all(machine.sources.values())
    for rate in ("host_bytes_per_s", "host_flop_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "disk_bytes_per_s"):
        assert getattr(machine.rates, rate) > 0
    assert (machine.gpu is None) == (name == "cpu")
    for entry in preset_tables()[name].values():
        assert not isinstance(entry, dict) or set(entry) == {"value", "source"}


def test_the_transfer_table_users_check_us_against() -> None:
    a100, pcie5 = assumed_machine("a100-pcie4").rates, assumed_machine("pcie5").rates
    assert (a100.device_bytes_per_s, a100.h2d_bytes_per_s, a100.host_bytes_per_s) == (2e12, 32e9, 90e9)
    assert a100.disk_bytes_per_s == 7e9
    assert pcie5.h2d_bytes_per_s == 64e9


def test_a_file_describes_a_machine_and_the_rest_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'gpu = "Mine"\nvram_bytes = 4e9\ndevice_bytes_per_s = 1e11\ndevice_flop_per_s = {value = 1e13, source = "me"}'
    )
    machine = assumed_machine(str(path))
    assert machine.gpu is not None
    assert (machine.gpu.name, machine.gpu.total_bytes) == ("Mine", 4_000_000_000)
    assert machine.rates.h2d_bytes_per_s == 32e9
    assert machine.sources is not None
    assert machine.sources["device_flop_per_s"] == "me"


def test_a_machine_files_words_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'gpu = "a\\u001b[2Jb"\ndescription = "c\\nd\\u009b"\nvram_bytes = 4e9\ndevice_bytes_per_s = 1e11\n'
        "device_flop_per_s = 1e13"
    )
    machine = assumed_machine(str(path))
    assert machine.gpu is not None
    assert machine.gpu.name == "a?[2Jb"
    assert "c d?" in machine.notes[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speed = 3", "speed"),
        ("cores = 'many'", "many"),
        ("cores = 0", "cores"),
        ("cores = 0.5", "cores"),
        ("h2d_bytes_per_s = -1", "h2d_bytes_per_s"),
        ("vram_bytes = 8e9", "device_bytes_per_s"),
        ("= = =", "TOML"),
        ("cores = {source = 'x'}", "cores"),
    ],
)
def test_a_bad_machine_file_is_one_sentence(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BadRequestError) as error:
        assumed_machine(str(path))
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["no-such", "default", "missing.toml", "dir/x"])
def test_a_machine_there_is_none_of_is_one_sentence(name: str) -> None:
    with pytest.raises(BadRequestError):
        assumed_machine(name)


def measured() -> Machine:
    """This machine's facts with made-up rates."""
    machine = replace(assumed_machine("cpu"), name="this machine", assumed=False, sources=None, measured_at="now")
    return replace(machine, cpu=facts.cpu(), memory=facts.memory(), gpus=facts.gpus())


def key_of(machine: Machine) -> str:
    return machine_store.fingerprint(machine.cpu, machine.memory, machine.gpus)


def test_a_measured_machine_is_remembered_and_its_free_memory_is_todays(tmp_path: Path) -> None:
    machine = measured()
    old = replace(machine, memory=replace(machine.memory, available_bytes=1))
    machine_store.save(old, tmp_path, key_of(machine))
    found = machine_store.this_machine(tmp_path)
    assert found is not None
    assert found.rates == machine.rates
    assert found.memory.available_bytes > 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_machine_that_was_measured_while_it_was_busy_says_so_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.schedule.probe.probe", lambda models: measured())
    for load, said in ((100.0, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        machine_store.measure(None, tmp_path)
        found = machine_store.this_machine(tmp_path)
        assert found is not None
        assert any("a load of 100.0" in note and "--refresh" in note for note in found.notes) == said


def test_another_machines_measurement_is_not_used(tmp_path: Path) -> None:
    machine = measured()
    other = replace(machine.cpu, cores=machine.cpu.cores + 1)
    key = machine_store.fingerprint(other, machine.memory, machine.gpus)
    assert key != key_of(machine)
    machine_store.save(machine, tmp_path, key)
    assert machine_store.this_machine(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 20_000, '{"version": 1}', '{"version": 1, "machine": {"gpus": 3}}', '{"version": 0}']
)
def test_a_damaged_memory_is_measured_anew(tmp_path: Path, text: str) -> None:
    machine = measured()
    machine_store.save(machine, tmp_path, key_of(machine))
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    path.write_text(text)
    assert machine_store.this_machine(tmp_path) is None
    path.write_text(json.dumps({**stored, "version": machine_store.VERSION + 1}))
    assert machine_store.this_machine(tmp_path) is None


@pytest.mark.parametrize("rate", ["fast", -1.0, 0.0, float("nan"), float("inf"), True, []])
def test_rates_that_cannot_be_are_measured_anew(tmp_path: Path, rate: object) -> None:
    machine = measured()
    machine_store.save(machine, tmp_path, key_of(machine))
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    stored["machine"]["rates"]["host_bytes_per_s"] = rate
    path.write_text(json.dumps(stored))
    assert machine_store.this_machine(tmp_path) is None


@pytest.mark.parametrize(("name", "value"), [("rates", []), ("notes", [1]), ("measured_at", 5), ("name", None)])
def test_words_that_are_none_are_measured_anew(tmp_path: Path, name: str, value: object) -> None:
    machine = measured()
    machine_store.save(machine, tmp_path, key_of(machine))
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    stored["machine"][name] = value
    path.write_text(json.dumps(stored))
    assert machine_store.this_machine(tmp_path) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine_store.save(measured(), tmp_path / "file" / "below", "key")


def test_json_and_back() -> None:
    machine = assumed_machine("h200")
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


def test_the_disk_is_read_or_it_is_said_why_not(tmp_path: Path) -> None:
    assert probe.read_disk(None).bytes_per_s is None
    assert "hybrid models pull" in probe.read_disk(None).note
    small = tmp_path / "small"
    small.write_bytes(b"x")
    assert probe.read_disk(small).bytes_per_s is None
    large = tmp_path / "large"
    large.write_bytes(bytes(2 * probe.DISK_BLOCK))
    assert probe.largest_file(tmp_path) == large
    rate = probe.read_disk(large).bytes_per_s
    assert rate is not None
    assert rate > 0


def test_all_cores_and_one_read_more_memory_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read_bandwidth(n_bytes: int, n_threads: int, seconds: float) -> float:
        asked.append((n_bytes, n_threads))
        return 10.0 * n_threads

    monkeypatch.setattr(probe, "available_ram", lambda: 64 * GB)
    monkeypatch.setattr(_native, "read_bandwidth", read_bandwidth)
    rates = probe.host_rates(3)
    assert (rates.host_bytes_per_s, rates.host_bytes_per_s_one_core) == (30.0, 10.0)
    assert asked == [(probe.READ_BYTES, 1), (probe.READ_BYTES, 3)]
    monkeypatch.setattr(probe, "available_ram", lambda: GB)
    asked.clear()
    assert probe.host_rates(1).host_bytes_per_s == 10.0
    assert asked == [(GB // 8, 1)]  # one core, once, and no more than the RAM can spare


def test_reading_memory_is_measured() -> None:
    assert _native.read_bandwidth(1 << 22, 2, 0.0) > 0
    for n_bytes, n_threads in ((0, 1), (-1, 1), (1 << 50, 1), (1 << 20, 0), (1 << 20, -3), (4096, 2)):
        with pytest.raises(ValueError, match="out of range"):
            _native.read_bandwidth(n_bytes, n_threads, 0.0)


def test_a_signal_ends_the_reading_of_memory() -> None:
    def told(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, told)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            _native.read_bandwidth(1 << 22, 2, 86400.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(bool(facts.gpus()), reason="with a GPU torch measures it")
def test_measuring_a_machine_without_a_gpu_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from hybrid.schedule.probe import probe;"
        "machine = probe(Path(sys.argv[1])); assert 'torch' not in sys.modules; print(json.dumps(machine.to_dict()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    machine = Machine.from_dict(json.loads(done.stdout))
    assert machine.emulated
    assert "emulated" in machine.notes[0]
    rates = {name: getattr(machine.rates, name) for name in RATES}
    assert rates.pop("disk_bytes_per_s") is None
    assert rates.pop("launch_s") is rates.pop("replay_s") is None  # nothing is launched
    assert all(rate > 0 for rate in rates.values())
    assert machine.rates.host_bytes_per_s >= machine.rates.host_bytes_per_s_one_core  # type: ignore[operator]
