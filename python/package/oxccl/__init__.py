"""Collectives between processes that survive the death of one, on any memory that Python can lend.

``init()`` meets the other ranks of the job and gives a `World`, the group of all ranks. Its operations work in place on NumPy arrays,
buffers and whatever has DLPack (torch, JAX), without a copy::

    import numpy, oxccl

    with oxccl.init() as world:          # under torchrun, mpirun or srun
        x = numpy.ones(4, numpy.float32)
        world.all_reduce(x)              # the sum over all ranks, in place

An operation blocks and runs on the calling thread without the GIL. With ``async_op=True`` it returns a `Work`: ``wait`` for it, or
``await`` it. What fails raises `Error`, which says what happened, to which rank, because of which peer.
"""

import atexit as _atexit

from oxccl._errors import Error, InvalidArgument, PeerLost, Timeout, Unsupported
from oxccl._oxccl import (
    Capabilities,
    Event,
    FileStore,
    Group,
    Lighthouse,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    Member,
    Memory,
    PrefixStore,
    PremulSum,
    Progress,
    QuantizedGroup,
    Quorum,
    QuorumResult,
    Recv,
    Send,
    Store,
    StoreServer,
    TcpStore,
    Traffic,
    Watch,
    Work,
    World,
    __version__,
    _end,
    backends,
    init,
    leaked_bytes,
    unconfigured,
)
from oxccl._status import LighthouseStatus

__all__ = [
    "Capabilities",
    "Error",
    "Event",
    "FileStore",
    "Group",
    "InvalidArgument",
    "Lighthouse",
    "LighthouseClient",
    "LighthouseStatus",
    "ManagerClient",
    "ManagerServer",
    "Member",
    "Memory",
    "PeerLost",
    "PrefixStore",
    "PremulSum",
    "Progress",
    "QuantizedGroup",
    "Quorum",
    "QuorumResult",
    "Recv",
    "Send",
    "Store",
    "StoreServer",
    "TcpStore",
    "Timeout",
    "Traffic",
    "Unsupported",
    "Watch",
    "Work",
    "World",
    "__version__",
    "backends",
    "init",
    "leaked_bytes",
    "unconfigured",
]

# Groups end before the interpreter does: their threads must not meet one that is half gone.
_atexit.register(_end)
