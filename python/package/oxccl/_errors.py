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

    kind: str
    """What went wrong, in terms of what the caller can do about it."""
    op: str | None
    """The operation."""
    rank: int | None
    """This process's rank in the group."""
    peer: int | None
    """The other rank that is involved."""
    peer_address: str | None
    """The peer's address."""
    epoch: int | None
    """The epoch of the group's configuration."""
    seq: int | None
    """The number of the collective in its group."""
    dtype: str | None
    """The element type."""
    count: int | None
    """The number of elements."""
    code: int | None
    """The library's own code."""
    retryable: bool
    """True if the same call may succeed later, or after the group was configured again."""
    advice: str
    """What to do."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        for name in _FIELDS:
            setattr(self, name, fields.get(name))

    def __reduce__(self) -> tuple[Any, ...]:
        """The same exception in another process."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return (_rebuild, (type(self), str(self), fields))


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return kind(message, **fields)


class InvalidArgument(Error, ValueError):
    """The call itself is wrong; nothing was sent."""


class Unsupported(Error, NotImplementedError):
    """The backend does not offer that."""


class Timeout(Error, TimeoutError):
    """A deadline passed; the message says what was being waited for."""


class PeerLost(Error, ConnectionError):
    """A peer is gone: its connection closed, or its process ended."""
