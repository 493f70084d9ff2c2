"""Rates to start from: what a machine's figures suggest before anything was measured with the model itself."""

from __future__ import annotations

from hybrid.schedule.launch import KERNELS
from hybrid.schedule.machine import Machine
from hybrid.schedule.rates import Coefficients, HalfRates

# Shares of a measured or nominal rate that are reached, and fixed times. All of them are guesses that a calibration
# replaces; `uncertainty` says how good they are.
HOST_SHARE = 0.9
"""llama.cpp's decode reads quantised weights at this share of the RAM's rate, where enough cores work on it."""
CORE_WEIGHTS = 9e9
"""Bytes of quantised weights that one core can take in a second, where unpacking them is what limits it: 8.4 (Q4_K to
Q8_0) and 9.5 (Q4_1) fitted on a Zen 3 core."""
CORE_KV = 2e9
"""llama.cpp's flash attention on one core: 1.6 and 1.9 fitted."""
EMULATED_CORE_KV = 1e9
"""torch's, which converts half precision first: 0.9 and 1.1 fitted."""
DEVICE_SHARE = 0.6
EMULATED_SHARE = 0.8
MATMUL_SHARE = 0.5
ATTENTION_SHARE = 0.5
CORE_LAYER_S, DEVICE_LAYER_S, EMULATED_LAYER_S = 15e-6, 40e-6, 400e-6
CROSSING_S, TOKEN_S = 30e-6, 200e-6
ASSUMED, MEASURED_MACHINE = 0.5, 0.35
"""Uncertainty with an assumed machine, and with one whose memories were measured."""
FALLBACK_BYTES, FALLBACK_FLOP = 10e9, 30e9
"""Of a rate that nobody knows: a slow machine's."""


def assumed_rates(machine: Machine, device: str) -> Coefficients:
    """Coefficients from the machine's figures for a head on `device` (`cpu` emulates one)."""
    rates, cores = machine.rates, machine.cpu.cores
    host = rates.host_bytes_per_s or FALLBACK_BYTES
    host_flop = rates.host_flop_per_s or FALLBACK_FLOP
    tail = HalfRates(
        layer_s=CORE_LAYER_S,
        weight_bytes_per_s=min(HOST_SHARE * host, cores * CORE_WEIGHTS),
        flop_per_s=MATMUL_SHARE * host_flop,
        kv_bytes_per_s=min(HOST_SHARE * host, cores * CORE_KV),
        attention_flop_per_s=ATTENTION_SHARE * host_flop,
        threads=cores,
    )
    if device == "cpu":
        head = HalfRates(
            layer_s=EMULATED_LAYER_S,
            weight_bytes_per_s=EMULATED_SHARE * host,
            flop_per_s=host_flop,
            kv_bytes_per_s=min(HOST_SHARE * host, cores * EMULATED_CORE_KV),
            attention_flop_per_s=ATTENTION_SHARE * host_flop,
            threads=cores,
        )
    else:
        flop = rates.device_flop_per_s or FALLBACK_FLOP
        launched_s = DEVICE_LAYER_S if rates.launch_s is None else KERNELS * rates.launch_s
        layer_s = launched_s if rates.replay_s is None else rates.replay_s
        head = HalfRates(
            layer_s=layer_s,
            chunk_layer_s=max(0.0, launched_s - layer_s),  # graphs are decode's
            weight_bytes_per_s=DEVICE_SHARE * (rates.device_bytes_per_s or FALLBACK_BYTES),
            flop_per_s=MATMUL_SHARE * flop,
            kv_bytes_per_s=DEVICE_SHARE * (rates.device_bytes_per_s or FALLBACK_BYTES),
            attention_flop_per_s=ATTENTION_SHARE * flop,
        )
    return Coefficients(
        head=head,
        tail=tail,
        host_kv_bytes_per_s=HOST_SHARE * host,
        bus_bytes_per_s=rates.h2d_bytes_per_s or FALLBACK_BYTES,
        back_bytes_per_s=rates.d2h_bytes_per_s or FALLBACK_BYTES,
        crossing_s=CROSSING_S,
        token_s=TOKEN_S,
        uncertainty=ASSUMED if machine.assumed or not machine.measured_at else MEASURED_MACHINE,
        measured=False,
    )
