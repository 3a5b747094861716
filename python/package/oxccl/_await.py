"""Awaiting an operation in an asyncio loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxccl._oxccl import Work


async def until_done(work: Work) -> None:
    """Waits without blocking the loop; raises the operation's error."""
    if not work.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        descriptor = work._done_descriptor()
        try:
            loop.add_reader(descriptor, _settle, done)
            try:
                await done
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
    work.wait(0)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
