"""The exceptions that operations raise."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    "kind",
    "op",
    "rank",
    "peer",
    "peer_address",
    "epoch",
    "seq",
    "dtype",
    "count",
    "code",
    "retryable",
    "advice",
)


class Error(RuntimeError):
    """What went wrong, and where.

    `kind` is one of ``InvalidArgument``, ``Unsupported``, ``InvalidState``, ``Timeout``, ``PeerLost``, ``Protocol``, ``Mismatch``,
    ``Aborted``, ``Poisoned``, ``NotFound``, ``Conflict``, ``Unavailable``, ``Io``, ``Corrupt``, ``Backend`` and ``Internal``. Fields that
    do not apply are ``None``.
    """

    kind: str = "Internal"
    """What went wrong, in terms of what the caller can do about it."""
    op: str | None = None
    """The operation."""
    rank: int | None = None
    """This process's rank in the group."""
    peer: int | None = None
    """The other rank that is involved."""
    peer_address: str | None = None
    """The peer's address."""
    epoch: int | None = None
    """The epoch of the group's configuration."""
    seq: int | None = None
    """The number of the collective in its group."""
    dtype: str | None = None
    """The element type."""
    count: int | None = None
    """The number of elements."""
    code: int | None = None
    """The library's own code."""
    retryable: bool = False
    """True if the same call may succeed later, or after the group was configured again."""
    advice: str = ""
    """What to do."""

    # Without an `__init__` of Python's: an error can be raised while the interpreter ends, where no Python code may run (`process.rs`).

    def __reduce__(self) -> tuple[Any, ...]:
        """The same exception in another process."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return (_rebuild, (type(self), str(self), fields))


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    error = kind(message)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class InvalidArgument(Error, ValueError):
    """The call itself is wrong; nothing was done."""

    kind = "InvalidArgument"


class Unsupported(Error, NotImplementedError):
    """The backend does not offer that."""

    kind = "Unsupported"


class Timeout(Error, TimeoutError):
    """A deadline passed; the message says what was being waited for."""

    kind = "Timeout"


class PeerLost(Error, ConnectionError):
    """A peer is gone: its connection closed, or its process ended."""

    kind = "PeerLost"
