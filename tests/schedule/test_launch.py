"""What a launch costs, told of a stand-in: a host that queues and a device that works the queue off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hybrid.cli.machine import _rows
from hybrid.model.spec import ModelSpec
from hybrid.schedule import launch
from hybrid.schedule.cost import CostModel
from hybrid.schedule.cost_prior import DEVICE_LAYER_S, assumed_rates
from hybrid.schedule.machine import Machine
from hybrid.schedule.placement import Placement
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.shape import parse_shape, shape_spec

US = 1e-6


class Device:
    """Kernels take `kernel_s` there; queueing one takes the host `host_s`, and a graph of any size `graph_s`."""

    def __init__(self, host_s: float, kernel_s: float, graph_s: float) -> None:
        self.host_s, self.kernel_s, self.graph_s = host_s, kernel_s, graph_s
        self.now = self.done = 0.0
        self.recording: list[None] | None = None

    def kernel(self) -> None:
        if self.recording is not None:
            self.recording.append(None)
            return
        self._queue(self.host_s, self.kernel_s)

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        self.recording = []
        run()
        n, self.recording = len(self.recording), None
        return lambda: self._queue(self.graph_s, n * self.kernel_s)

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def _queue(self, host_s: float, device_s: float) -> None:
        self.now += host_s
        self.done = max(self.done, self.now) + device_s


@pytest.mark.parametrize(
    ("device", "launch_s", "replay_s"),
    [
        (Device(5 * US, 1 * US, 8 * US), 5 * US, 20 * US),  # the host is what waits, then the device
        (Device(2 * US, 3 * US, 8 * US), 3 * US, 60 * US),
        (Device(5 * US, 0.1 * US, 8 * US), 5 * US, 8 * US),
    ],
)
def test_launches_and_replays_cost_what_the_slower_side_takes(device: Device, launch_s: float, replay_s: float) -> None:
    found = launch.launch_cost(device.kernel, device.synchronize, device.record, lambda: device.now)
    assert found.launch_s == pytest.approx(launch_s, rel=0.02)
    assert found.replay_s == pytest.approx(replay_s, rel=0.1)
    alone = launch.launch_cost(device.kernel, device.synchronize, None, lambda: device.now)
    assert alone.replay_s is None


SPEC: ModelSpec = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))


def with_launches(launch_s: float | None, replay_s: float | None) -> Machine:
    machine = assumed_machine("rtx4090")
    return replace(machine, rates=replace(machine.rates, launch_s=launch_s, replay_s=replay_s))


def test_the_cost_model_takes_a_layers_fixed_cost_from_them() -> None:
    """Decode replays a graph a layer, where there are graphs; a chunk's kernels are launched one by one."""
    p = Placement(device="cuda", n_gpu_layers=32, n_ctx=4096)

    def costs(machine: Machine) -> tuple[float, float]:
        model = CostModel(SPEC, machine, assumed_rates(machine, "cuda"))
        return model.tpot_s(p, 0), model.chunk_s(p, 1, 0)[0]

    base = costs(with_launches(None, None))
    step, chunk = costs(with_launches(5 * US, 30 * US))
    assert step - base[0] == pytest.approx(33 * (30 * US - DEVICE_LAYER_S))  # the output head is one more
    assert chunk - base[1] == pytest.approx(32 * (100 * US - DEVICE_LAYER_S))
    step, chunk = costs(with_launches(5 * US, None))
    assert step - base[0] == pytest.approx(33 * (100 * US - DEVICE_LAYER_S))
    assert chunk - base[1] == pytest.approx(32 * (100 * US - DEVICE_LAYER_S))


def test_a_machine_says_what_it_measured_and_nothing_else() -> None:
    names = dict(_rows(with_launches(5 * US, 30 * US)))
    assert (names["kernel launch"], names["graph of 20"]) == ("5.0 µs", "30.0 µs")
    assert not {"kernel launch", "graph of 20"} & dict(_rows(with_launches(None, None))).keys()
