"""What a measured run adds to the profile."""

from __future__ import annotations

from hybrid.report.trial import Trial
from hybrid.schedule.profile import Record, now


def record_of(trial: Trial) -> Record:
    """What the profile keeps of a trial."""
    condition, memory = trial.condition, trial.memory
    return Record(
        placement=condition.placement,
        source="tune",
        at=trial.at or now(),
        depth=condition.depth,
        decode_s=trial.decode_s,
        n_prompt=condition.depth if trial.ttft_s else 0,
        prefill_s=trial.ttft_s,
        wall_s=trial.wall_s,
        vram_budget=condition.vram_budget,
        device_bytes=memory.device_bytes if memory else None,
        host_bytes=memory.host_bytes if memory else None,
        failure=trial.failure.kind if trial.failure else "",
        message=trial.failure.message if trial.failure else "",
    )
