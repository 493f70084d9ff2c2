"""What `/set` can change: how the model samples, and what the chat shows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from hybrid.errors import BadRequestError
from hybrid.runtime.reply import Options
from hybrid.runtime.sampling import SamplingParams

ALIASES = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens"}
WHOLE = ("max_tokens", "top_k", "seed")
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")
"""Options of `Hybrid.generate`, by the names they have there; `-` may stand for `_`."""


def change(options: MutableMapping[str, Any], text: str) -> str:
    """Obey `NAME VALUE` and return the new state as a sentence. Raises BadRequestError for what cannot be."""
    name, _, value = text.replace("=", " ").partition(" ")
    known = name.strip().replace("-", "_")
    known = ALIASES.get(known, known)
    if known not in SETTINGS:
        raise BadRequestError(f"There is no setting {name!r}; there are {', '.join(SETTINGS)}.")
    changed = {**options, known: _parse(known, value.strip())}
    sampling = {key: changed[key] for key in SETTINGS if key in changed and key != "max_tokens"}
    Options(sampling=SamplingParams(**sampling), max_tokens=changed.get("max_tokens"))
    options[known] = changed[known]
    return f"{known} is {_shown(options[known])} from the next answer on."


def listing(options: Mapping[str, Any]) -> str:
    """All settings, one a line."""
    return "\n".join(f"{name:15} {_shown(options.get(name))}" for name in SETTINGS)


def _parse(name: str, value: str) -> Any:
    if not value:
        raise BadRequestError(f"What is {name} to be? /set {name} VALUE.")
    if name in ("seed", "max_tokens") and value in ("none", "off", "-1"):
        return None
    try:
        return int(value) if name in WHOLE else float(value)
    except ValueError:
        kind = "a whole number" if name in WHOLE else "a number"
        raise BadRequestError(f"{name} must be {kind}, not {value!r}.") from None


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
