"""What a lighthouse says of its job."""

from __future__ import annotations

from typing import TypedDict


class ParticipantStatus(TypedDict):
    """A member of the present quorum."""

    replica_id: str
    address: str
    step: int
    world_size: int
    commit_failures: int


class HealthyReplica(TypedDict):
    """A replica that counts as healthy, and how long ago it was heard of."""

    replica_id: str
    heartbeat_age_ms: int


class WaitingReplica(TypedDict):
    """A replica that waits for a quorum, and since when."""

    replica_id: str
    waiting_ms: int


class SpareStatus(TypedDict):
    """A replica that is far behind, and whether it fetches the state now."""

    replica_id: str
    fetching: bool


class OrderedReplica(TypedDict):
    """A replica to which an operator gave an order, and why."""

    replica_id: str
    reason: str


class LighthouseStatus(TypedDict):
    """The state of a lighthouse."""

    quorum_id: int
    participants: list[ParticipantStatus]
    healthy: list[HealthyReplica]
    waiting: list[WaitingReplica]
    attached: list[str]
    spares: list[SpareStatus]
    draining: list[OrderedReplica]
    evicted: list[OrderedReplica]
    reason: str
    """Why there is no new quorum."""
    aborted: str | None
    """Why the present epoch was aborted, if it was."""
    leads: bool
    """False for a lighthouse that leaves its job to another one: it knows none of the above."""
    leader: str | None
    """The address of the lighthouse that leads, if this one leaves the job to it and knows it."""
