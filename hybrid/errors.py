"""Everything that can go wrong for a user, as one exception family.

The message is one sentence the user can act on; the CLI prints it and exits with `exit_code`.
"""


class HybridError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2


class BadFileError(HybridError):
    """A GGUF that cannot be trusted: truncated, malformed, inconsistent, or not a GGUF at all."""


class UnsupportedError(HybridError):
    """A sound request this version (or this machine) cannot serve: an architecture, a k, a device."""


class BadRequestError(HybridError):
    """A request that is wrong in itself: a bad argument, a prompt longer than the context."""


class OutOfMemoryError(HybridError):
    """Something does not fit; the message names what, how much it needs and how much there is."""


class HostMemoryError(OutOfMemoryError):
    """It is the host's RAM that does not suffice: fewer layers on the GPU would need more of it."""


class EngineError(HybridError):
    """llama.cpp or torch failed where our checks did not expect it."""


class Cancelled(HybridError):  # noqa: N818 - not a failure: the user asked for it
    """The user interrupted a load or an evaluation."""

    exit_code = 130
