"""CostModel: seconds a Placement takes on a Machine, at any depth, for prefill and for one token.

Times add, speeds do not. With S sequences decoded together at depth d, layer i of a half costs

    t_i = c + w_i / W + (S - 1) f_i / F + S v_i(d) / A                                                       (1)

and a token costs                                                                                             (2)

    T = sum over the head (t_i) + x + sum over the tail (t_i) + o + t_0

where  c    seconds a layer, whatever it computes (launches, barriers)
       w_i  bytes of its weights as they are held; W bytes of weights read a second
       f_i  floating-point operations a token, 2 a weight; F of them a second, in matrix products of many tokens
       v_i  bytes of K and V that one token attends to (a window's at most); A bytes of them read a second
       x    the boundary: 4 S n_embd bytes over the bus, and a synchronisation
       o    the output head, like a layer of the half it lies in; t_0 seconds a token for everything else.

A chunk of n tokens at depth d costs a half                                                                   (3)

    sum over its layers (c + n f_i / F + n a_i(d + n / 2) / G)

where a_i(m) = 2 n_heads (head_dim_k + head_dim_v) m is attention's operations for a token that sees m, and G of them a
second. Head and tail overlap: with h_j and t_j for chunk j, prefill is h_1 + sum max(h_j, t_(j-1)) + t_m.     (4)

Where K and V of the head's layers do not lie on the device, v_i / A becomes

    stream  each layer's v_i comes over the bus (B bytes a second) while the layer before computes:           (5)
            v_1 / B + sum max(t_i, S v_(i+1) / B)      - FlexGen's double buffering (arXiv:2303.06865)
    attend  S v_i / A_host + e, the exchange e of q, k, v and the output                                        (6)
    tiered  max(device's part / A, host's part / A_host) + e                                                    (7)
            - HGCA, HybridGen: both parts at once, merged by log-sum-exp

(a chunk of a prompt attends on the device under every strategy: what lies on the host is streamed behind it).

Depths and cached tokens are per sequence; all sequences are equally deep.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from hybrid.model.spec import LayerSpec, ModelSpec
from hybrid.schedule import head_size
from hybrid.schedule.kv_size import kv_bytes_per_token, visible_tokens
from hybrid.schedule.kv_tiers import Tiers, layer_traffic, tiers
from hybrid.schedule.layer_work import LayerWork, works
from hybrid.schedule.machine import Machine
from hybrid.schedule.placement import Placement
from hybrid.schedule.rates import Coefficients, HalfRates

MOST_CHUNKS = 48
"""Chunks that are computed one by one; of more, every so-many-th stands for its neighbours."""


@dataclass(frozen=True)
class CostModel:
    """The equations above for one model on one machine."""

    spec: ModelSpec
    machine: Machine
    rates: Coefficients

    def tpot_s(self, p: Placement, depth: int) -> float:
        """Seconds a step of decode takes, at which every sequence gets a token: equation (2)."""
        return self.head_s(p, depth) + self.tail_s(p, depth) + self.crossing_s(p) + self.rates.token_s

    def head_s(self, p: Placement, depth: int) -> float:
        """The head's share of a token: equations (1) and (5) to (7)."""
        k, rates = p.n_gpu_layers, self._head(p)
        if k == 0:
            return 0.0
        head = self._works(p)[:k]
        parts = {
            work: _layer_s(rates, work.held_bytes * work.active_share, work.flop, p.n_sequences)
            + self._attention_s(p, work.layer, depth)
            for work in set(head)
        }
        if p.kv == "stream":
            moved = {work: self._moved(p, work.layer, depth) / self.rates.bus_bytes_per_s for work in parts}
            arrivals = [*(moved[work] for work in head[1:]), 0.0]
            total = moved[head[0]] + sum(max(parts[work], then) for work, then in zip(head, arrivals, strict=True))
        else:
            total = sum(parts[work] for work in head)
        return total + (self._output_s(rates, self._output_held(p), p.n_sequences) if k == self.spec.n_layers else 0.0)

    def tail_s(self, p: Placement, depth: int) -> float:
        """The tail's share of a token: equation (1), and the output head."""
        rates, tail = self.rates.tail.at(p.n_threads_tail), Counter(self._works(p)[p.n_gpu_layers :])
        if not tail:
            return 0.0
        total = 0.0
        for work, n in tail.items():
            weights = _layer_s(rates, work.file_bytes * work.active_share, work.flop, p.n_sequences)
            total += n * (weights + p.n_sequences * self._kv(p, work.layer, depth) / rates.kv_bytes_per_s)
        return total + self._output_s(rates, self.spec.output_tensor.n_bytes, p.n_sequences)

    def crossing_s(self, p: Placement) -> float:
        """x: hidden states on their way from the head to the tail."""
        if not 0 < p.n_gpu_layers < self.spec.n_layers:
            return 0.0
        moved = 0 if p.device == "cpu" else 4 * self.spec.n_embd * p.n_sequences
        return self.rates.crossing_s + moved / self.rates.back_bytes_per_s

    def prefill_s(self, p: Placement, n_prompt: int, depth: int = 0) -> float:
        """Seconds until a prompt of n_prompt tokens after `depth` is evaluated and its last logits are there: (4)."""
        if n_prompt < 1:
            return 0.0
        n_chunks = math.ceil(n_prompt / p.n_batch)
        stride = math.ceil(n_chunks / MOST_CHUNKS)
        starts = range(0, n_chunks * p.n_batch, stride * p.n_batch)
        total, behind = 0.0, 0.0  # the tail's chunk that runs beside the head's next one
        for start in starts:
            together = min(stride, n_chunks - start // p.n_batch)
            middle = start + together // 2 * p.n_batch
            n = min(p.n_batch, n_prompt - middle)
            head, tail = self.chunk_s(p, n, depth + middle)
            total += max(head, behind) + (together - 1) * max(head, tail)
            behind = tail
        rates = self._head(p) if p.n_gpu_layers == self.spec.n_layers else self.rates.tail.at(p.n_threads_tail)
        held = self._output_held(p) if p.n_gpu_layers == self.spec.n_layers else self.spec.output_tensor.n_bytes
        return total + behind + self._output_s(rates, held, 1) + self.rates.token_s + self.crossing_s(p)

    def chunk_s(self, p: Placement, n: int, depth: int) -> tuple[float, float]:
        """Head's and tail's seconds for a chunk of n tokens at `depth`, without the output head: equation (3)."""
        k, layers = p.n_gpu_layers, self._works(p)
        rates = self._head(p)
        head = streamed = 0.0
        in_head, in_tail = self._kinds(p)
        for work, count in in_head.items():
            head += count * _chunk_layer_s(rates, work, n, depth)
            streamed += count * self._moved(p, work.layer, depth) / self.rates.bus_bytes_per_s
        rates = self.rates.tail.at(p.n_threads_tail_batch)
        tail = sum(count * _chunk_layer_s(rates, work, n, depth) for work, count in in_tail.items())
        if k < self.spec.n_layers:
            tail += _chunk_layer_s(rates, layers[-1], n, depth, ffn=False)
        return max(head, streamed), tail

    def kv_transfer_s(self, p: Placement, depth: int) -> float:
        """Seconds a token's K and V spend on the bus, overlapped or not: all that lies on the host for `stream`,
        one token's q, k, v and output for the strategies that attend there."""
        layers = self.spec.layers[: p.n_gpu_layers]
        moved = self._moved if p.kv == "stream" else self._exchanged
        return sum(moved(p, layer, depth) for layer in layers) / self.rates.bus_bytes_per_s

    def layer_transfer_s(self, p: Placement, depth: int) -> dict[str, float]:
        """Seconds to read the largest layer's K and V of all sequences at `depth` once: from the device's own memory,
        over the bus, and from the disk."""
        n_bytes = p.n_sequences * max(self._kv(p, layer, depth, count_self=False) for layer in self.spec.layers)
        rates = self.machine.rates
        paths = {"hbm": rates.device_bytes_per_s, "pcie": self.rates.bus_bytes_per_s, "nvme": rates.disk_bytes_per_s}
        return {path: n_bytes / rate for path, rate in paths.items() if rate}

    # -- parts ---------------------------------------------------------------------------------------------------

    @cached_property
    def _work_by_device(self) -> dict[bool, tuple[LayerWork, ...]]:
        return {on_cpu: works(self.spec.layers, "cpu" if on_cpu else "cuda") for on_cpu in (True, False)}

    @cached_property
    def _tiers(self) -> dict[Placement, list[Tiers]]:
        """Those of each placement that was asked about."""
        return {}

    def _works(self, p: Placement) -> tuple[LayerWork, ...]:
        return self._work_by_device[p.device == "cpu"]

    def _kinds(self, p: Placement) -> tuple[Counter[LayerWork], Counter[LayerWork]]:
        """How many layers of each kind are in the head, and in the tail but for its last one."""
        key = p.n_gpu_layers, p.device == "cpu"
        if key not in self._counted:
            layers, k = self._works(p), p.n_gpu_layers
            self._counted[key] = Counter(layers[:k]), Counter(layers[k:-1])
        return self._counted[key]

    @cached_property
    def _counted(self) -> dict[tuple[int, bool], tuple[Counter[LayerWork], Counter[LayerWork]]]:
        return {}

    def _head(self, p: Placement) -> HalfRates:
        return self.rates.head.at(p.n_threads_head) if p.device == "cpu" else self.rates.head

    def _output_held(self, p: Placement) -> int:
        return head_size.output_head_bytes(self.spec, p.device)

    def _output_s(self, rates: HalfRates, held: int, sequences: int) -> float:
        """o: the output head, as it is held, for one token of every sequence."""
        output = replace(rates, weight_bytes_per_s=rates.output_bytes_per_s or rates.weight_bytes_per_s)
        return _layer_s(output, held, 2 * self.spec.output_tensor.n_values, sequences)

    def _kv(self, p: Placement, layer: LayerSpec, depth: int, count_self: bool = True) -> int:
        """v_i: K and V of one sequence that a token at `depth` attends to."""
        return (visible_tokens(layer, depth) + count_self) * kv_bytes_per_token(layer, p.kv_dtype)

    def _here(self, p: Placement, layer: LayerSpec, depth: int) -> float:
        """The share of a head layer's K and V that lies on the device."""
        tier, seen = self._tier(p, layer), visible_tokens(layer, depth) + 1
        if tier.host == 0 or p.kv == "stream":
            return float(tier.host == 0)
        return 1 - max(0, tier.split(depth + 1) - (depth + 1 - seen)) / seen

    def _tier(self, p: Placement, layer: LayerSpec) -> Tiers:
        if p not in self._tiers:
            self._tiers[p] = tiers(self.spec.layers[: p.n_gpu_layers], p)
        return self._tiers[p][layer.index]

    def _moved(self, p: Placement, layer: LayerSpec, depth: int) -> float:
        """Bytes of cached K and V that lie on the host and must come to the device to be attended to there."""
        there = 1.0 - self._here(p, layer, depth)
        return there * p.n_sequences * self._kv(p, layer, depth, count_self=False)

    def _exchanged(self, p: Placement, layer: LayerSpec, depth: int) -> int:
        """What crosses for one token of every sequence where the CPU attends: its query, its rows, the output."""
        if p.kv == "stream" or self._here(p, layer, depth) == 1.0:
            return 0
        traffic = layer_traffic(layer, self._tier(p, layer), p, depth)
        return traffic.to_device + traffic.to_host

    def _attention_s(self, p: Placement, layer: LayerSpec, depth: int) -> float:
        n_bytes, rates = p.n_sequences * self._kv(p, layer, depth), self._head(p)
        here = 1.0 if p.kv == "stream" else self._here(p, layer, depth)
        exchanged = self._exchanged(p, layer, depth)
        crossing = 2 * self.rates.crossing_s + exchanged / self.rates.bus_bytes_per_s if exchanged else 0.0
        on_host = (1 - here) * n_bytes / self.rates.host_kv_bytes_per_s
        return max(here * n_bytes / rates.kv_bytes_per_s, on_host) + crossing


def _layer_s(rates: HalfRates, held: float, flop: float, sequences: int) -> float:
    """(1) without attention."""
    return rates.layer_s + held / rates.weight_bytes_per_s + (sequences - 1) * flop / rates.flop_per_s


def _chunk_layer_s(rates: HalfRates, work: LayerWork, n: int, depth: int, ffn: bool = True) -> float:
    """(3) for one layer."""
    matmul, attention = work.chunk(n, depth, ffn)
    fixed = rates.layer_s + rates.chunk_layer_s
    return fixed + matmul / rates.flop_per_s + attention / rates.attention_flop_per_s


def longest_context(model: CostModel, p: Placement, tpot_s: float, limit: int) -> int:
    """The greatest depth up to `limit` at which a token still takes at most `tpot_s`; -1 if not even the first does."""
    if model.tpot_s(p, 0) > tpot_s:
        return -1
    low, high = 0, limit
    while low < high:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if model.tpot_s(p, middle) <= tpot_s else (low, middle - 1)
    return low
