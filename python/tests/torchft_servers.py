"""A plugin of pytest: torchft's own tests run against our lighthouse and manager servers, which torchft's clients reach on torchft's wire."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torchft._torchft
import torchft.manager

import oxccl


class LighthouseServer:
    """`oxccl.Lighthouse` under torchft's names; torchft's join time-out is 100 ms where none is given."""

    def __init__(self, bind: str, min_replicas: int, join_timeout_ms: int = 100, quorum_tick_ms: int = 100, heartbeat_timeout_ms: int = 5000) -> None:
        self._server = oxccl.Lighthouse(
            bind,
            min_replicas=min_replicas,
            join_timeout=join_timeout_ms / 1000,
            quorum_tick=quorum_tick_ms / 1000,
            heartbeat_timeout=heartbeat_timeout_ms / 1000,
            advertise_host="localhost",
            insecure=True,
        )

    def address(self) -> str:
        """As ours."""
        return self._server.address

    def shutdown(self) -> None:
        """As ours."""
        self._server.shutdown()


class ManagerServer:
    """`oxccl.ManagerServer` under torchft's names."""

    made = 0

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        type(self).made += 1
        self._server = oxccl.ManagerServer(
            replica_id,
            lighthouse_addr,
            store_address=store_addr,
            world_size=world_size,
            bind=bind,
            advertise_host="localhost",
            heartbeat_interval=heartbeat_interval.total_seconds(),
            connect_timeout=connect_timeout.total_seconds(),
            quorum_retries=quorum_retries,
            insecure=True,
        )

    def address(self) -> str:
        """As ours."""
        return self._server.address

    def shutdown(self) -> None:
        """As ours."""
        self._server.shutdown()


# Their replicas are threads of one process. One may draw a batch when another one has just seeded the process's generator for its model, which then
# begins with other weights: batches come from a generator of their own.
_batches = torch.Generator()
torch.rand = partial(torch.rand, generator=_batches)
torch.randint = partial(torch.randint, generator=_batches)

torchft._torchft.LighthouseServer = LighthouseServer
torchft.manager.ManagerServer = ManagerServer


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says that it was our servers that ran."""
    terminalreporter.write_line(f"manager servers of oxccl: {ManagerServer.made}")
