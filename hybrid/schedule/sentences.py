"""What several commands have to say, in the same words."""

from __future__ import annotations

from hybrid.model.spec import ModelSpec

EMULATED = "The GPU is emulated on the CPU (--device cpu): right results, not a GPU's speed."


def longer_than_trained(n_ctx: int, spec: ModelSpec) -> str:
    """For a context that the model was not trained for."""
    return f"A context of {n_ctx} is longer than the {spec.n_ctx_train} this model was trained for."
