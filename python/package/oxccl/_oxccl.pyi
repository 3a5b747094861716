"""The extension module behind `oxccl`."""

from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, overload

from typing_extensions import Buffer, Self

from oxccl._errors import Error
from oxccl._status import LighthouseStatus

class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...

Tensor: TypeAlias = Buffer | _DLPack
"""Whatever lends contiguous host memory: NumPy arrays, buffers, and tensors with DLPack (torch, JAX)."""
Tensors: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or a list or tuple of them that counts as one operation."""
Limit: TypeAlias = float | timedelta
"""How long something may take: seconds, or a `timedelta`, which says, as in torch, that the default counts if it is not positive."""
Reduction: TypeAlias = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"] | PremulSum

__version__: str

class Capabilities:
    """What a group offers."""

    @property
    def ops(self) -> list[str]:
        """Names of the operations that are served."""

    @property
    def dtypes(self) -> list[str]:
        """Names of the element types that can be moved."""

    def reduces(self, op: str) -> list[str]:
        """Names of the element types that `op` reduces."""

    @property
    def features(self) -> list[str]:
        """Names of the features."""

    @property
    def options(self) -> list[str]:
        """Names of the options that are honoured."""

    @property
    def devices(self) -> list[str]:
        """Kinds of devices whose memory is served."""

    @property
    def notes(self) -> list[tuple[str, str]]:
        """What is composed rather than native, or limited: (operation, in words)."""

class Traffic:
    """Bytes that a group has moved, over all its configurations, headers included."""

    @property
    def sent(self) -> int:
        """Bytes sent to other ranks."""

    @property
    def received(self) -> int:
        """Bytes received from other ranks."""

class Memory:
    """Memory of a group, from `Group.alloc`, which goes with the last view of it. Operations take it as it is.

    Views of it: ``torch.from_dlpack(memory)``, ``numpy.from_dlpack(memory)`` (NumPy 2.1 or newer: before, they are read-only).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""

    @property
    def dtype(self) -> str:
        """The name of the element type."""

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule with a view. Raises `BufferError` if a copy is asked for, or another device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""

    def _is_lent(self) -> bool: ...

class PremulSum:
    """The reduction that multiplies each rank's values by its `factor` and sums."""

    def __new__(cls, factor: float) -> Self: ...
    @property
    def factor(self) -> float:
        """The factor of this rank."""

class Send:
    """A send in a batch."""

    def __new__(cls, tensor: Tensor, peer: int, tag: int = 0) -> Self: ...
    @property
    def tensor(self) -> Tensor:
        """What is sent."""

    @property
    def peer(self) -> int:
        """The receiver."""

    @property
    def tag(self) -> int:
        """Matched with the receive's tag."""

class Recv:
    """A receive in a batch; without a peer from the first that sends with the tag."""

    def __new__(cls, tensor: Tensor, peer: int | None = None, tag: int = 0) -> Self: ...
    @property
    def tensor(self) -> Tensor:
        """What is written."""

    @property
    def peer(self) -> int | None:
        """The sender, or ``None`` for any."""

    @property
    def tag(self) -> int:
        """Matched with the send's tag."""

class Work:
    """An operation in flight: `wait` for it, or ``await`` it.

    It keeps the memory of its tensors alive until it has ended, also when it is dropped before.
    """

    @property
    def op(self) -> str:
        """The name of the operation."""

    def wait(self, timeout: Limit | None = None) -> None:
        """Waits until the operation has ended; raises its error.

        After `timeout` seconds raises `Timeout`, and the operation goes on.
        """

    def done(self) -> bool:
        """Tells whether the operation has ended."""

    @property
    def error(self) -> Error | None:
        """The error of an operation that failed."""

    @property
    def source(self) -> int | None:
        """After `wait` for a receive: the rank that sent."""

    @property
    def contributors(self) -> int:
        """How many ranks contributed to a finished reduction; 0 before, and for other operations."""

    @property
    def seconds(self) -> float | None:
        """From submission to the end, once it has ended."""

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends the operation; on backends that cannot end one alone, all of its group."""

    def _tell(self, completions: _Completions, number: int) -> None: ...
    def _done_descriptor(self) -> int: ...
    def __await__(self) -> Generator[Any, Any]: ...

class _Completions:
    def __new__(cls) -> Self: ...
    def next(self) -> int | None: ...
    def close(self) -> None: ...

class Store:
    """A key-value store that all ranks of a job reach. Time-outs are seconds; values are bytes."""

    def set(self, key: str, value: bytes, *, timeout: float = 60.0) -> None:
        """Sets `key`."""

    def get(self, key: str, *, timeout: float = 60.0) -> bytes:
        """The value of `key`, waiting until it exists."""

    def add(self, key: str, amount: int, *, timeout: float = 60.0) -> int:
        """Adds to the integer at `key` and gives the new value."""

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float = 60.0) -> bytes:
        """Sets `desired` if the value is `expected`, or if there is none and `expected` is empty. Gives the value that stands then."""

    def check(self, keys: Sequence[str], *, timeout: float = 60.0) -> bool:
        """True if all keys exist."""

    def wait(self, keys: Sequence[str], *, timeout: float = 60.0) -> None:
        """Waits until all keys exist."""

    def delete(self, key: str, *, timeout: float = 60.0) -> bool:
        """Removes `key`; true if it existed."""

    def barrier(self, key: str, world_size: int, *, timeout: float = 60.0) -> None:
        """Waits until `world_size` callers have entered the barrier `key`, which serves once."""

class TcpStore(Store):
    """A client of a `StoreServer`, or of torch's TCPStore, at ``host:port``."""

    def __new__(cls, address: str, *, timeout: float = 60.0) -> Self: ...

class FileStore(Store):
    """A store in a file on a file system that all ranks share."""

    def __new__(cls, path: str | PathLike[str]) -> Self: ...

class PrefixStore(Store):
    """A view of another store, with ``prefix/`` before every key."""

    def __new__(cls, prefix: str, store: Any) -> Self: ...

class StoreServer:
    """A store's server, in the protocol of torch's TCPStore."""

    def __new__(cls, bind: str = "127.0.0.1:0") -> Self: ...
    @property
    def address(self) -> str:
        """Where it listens, with the real port."""

    def shutdown(self) -> None:
        """Ends all connections and frees the port."""

_Path: TypeAlias = str | PathLike[str]

class Lighthouse:
    """The lighthouse of a job, in this process: replicas find each other through it.

    `bind` is where it listens; port 0 takes a free one. A quorum has at least `min_replicas` members; the first one waits for
    `initial_replicas`, and each at most `join_timeout` seconds for healthy replicas that have not asked yet. A replica that is silent for
    `heartbeat_timeout` seconds is dead; `quorum_tick` is how often time-outs are looked at. `state_file` keeps the job's record over restarts, or
    `etcd` (``host:port`` of the cluster's members) under the name `job`, which several lighthouses may share. `accept_rollback` lets the first
    quorum go back to an earlier step than the recorded one. `advertise_host` is the host in `address`.

    `credentials` is the folder of the job's credentials (``oxccl credentials new``), or several, one for each job; without it that of
    ``OXCCL_CREDENTIALS``. Without any the lighthouse listens on loopback only, unless `insecure`.
    """

    def __new__(
        cls,
        bind: str = "127.0.0.1:0",
        *,
        min_replicas: int = 1,
        initial_replicas: int | None = None,
        join_timeout: float = 60.0,
        heartbeat_timeout: float = 5.0,
        quorum_tick: float = 0.1,
        state_file: _Path | None = None,
        etcd: Sequence[str] | None = None,
        job: str = "job",
        accept_rollback: bool = False,
        advertise_host: str | None = None,
        credentials: _Path | Sequence[_Path] | None = None,
        insecure: bool = False,
    ) -> Self: ...
    @property
    def address(self) -> str:
        """The URL that managers are given: ``http://host:port``, ``https://`` with credentials."""

    def shutdown(self, timeout: float = 5.0) -> None:
        """Closes the port and all connections; a second call does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class ManagerServer:
    """The server between the ranks of a replica and the lighthouse: one per replica, in the process of its rank 0.

    `replica_id` is ``name:random``, with another end in each run; `lighthouse` is the lighthouse's URL (of several all, separated by
    commas); `store_address` is the replica's store, told to the other replicas; `world_size` is the number of its ranks. A rank that neither
    waits in a call nor shows progress for `progress_timeout` seconds takes the replica out of the quorum. The lighthouse gets a heartbeat every
    `heartbeat_interval` seconds and must be reached within `connect_timeout`; a failed quorum call is tried again `quorum_retries` times.

    `credentials` is the folder of the job's credentials; without it that of ``OXCCL_CREDENTIALS``. Without any the server listens on
    loopback only, unless `insecure`. As a context manager it leaves in good order, unless an exception ends the block.
    """

    def __new__(
        cls,
        replica_id: str,
        lighthouse: str,
        *,
        store_address: str,
        world_size: int = 1,
        bind: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        heartbeat_interval: float = 0.1,
        connect_timeout: float = 10.0,
        progress_timeout: float = 120.0,
        quorum_retries: int = 0,
        credentials: _Path | None = None,
        insecure: bool = False,
    ) -> Self: ...
    @property
    def address(self) -> str:
        """The URL that the replica's ranks and the other replicas are given."""

    @property
    def replica_id(self) -> str:
        """The replica."""

    def leave(self, timeout: float = 5.0) -> None:
        """Tells the lighthouse that the replica leaves, so that the others do not wait for it."""

    def shutdown(self, timeout: float = 5.0) -> None:
        """Closes the port and all connections, which the lighthouse takes for the replica's death unless it has left.

        A second call does nothing.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class Member:
    """A replica as its quorum names it."""

    @property
    def replica_id(self) -> str:
        """Its id."""

    @property
    def address(self) -> str:
        """The URL of its manager server."""

    @property
    def store_address(self) -> str:
        """Where its store listens."""

    @property
    def step(self) -> int:
        """The step of its state."""

    @property
    def world_size(self) -> int:
        """The number of its ranks."""

    @property
    def shrink_only(self) -> bool:
        """Whether it asked for a quorum without newcomers."""

    @property
    def data(self) -> str:
        """JSON of the caller's choice; carried, never read."""

    @property
    def commit_failures(self) -> int:
        """Steps in a row that it did not commit."""

class Quorum:
    """The replicas that take part in an epoch, the same for all of them."""

    @property
    def quorum_id(self) -> int:
        """The epoch; it never goes down."""

    @property
    def participants(self) -> list[Member]:
        """The members in order of their ids."""

class QuorumResult:
    """A rank's part in a quorum."""

    @property
    def quorum_id(self) -> int:
        """The epoch."""

    @property
    def replica_rank(self) -> int:
        """The replica's rank among all members, in order of their ids."""

    @property
    def replica_world_size(self) -> int:
        """The number of members."""

    @property
    def store_address(self) -> str:
        """The store through which the ranks with this group rank meet (``host:port``)."""

    @property
    def max_step(self) -> int:
        """The highest step of a member."""

    @property
    def max_replica_rank(self) -> int | None:
        """The replica's rank among the members that are up to date; ``None`` if it is behind."""

    @property
    def max_world_size(self) -> int:
        """The number of members that are up to date."""

    @property
    def heal(self) -> bool:
        """True if this replica fetches its state from another one."""

    @property
    def recover_src_manager_address(self) -> str:
        """The manager server of the checkpoint source; empty if there is none."""

    @property
    def recover_src_replica_rank(self) -> int | None:
        """The checkpoint source's `replica_rank`."""

    @property
    def recover_dst_replica_ranks(self) -> list[int]:
        """The replicas whose first checkpoint source this one is."""

    @property
    def commit_failures(self) -> int:
        """The highest number of commit failures of a member."""

    @property
    def batches_committed(self) -> int:
        """How many batches led to the state of the members that are up to date."""

    @property
    def replica_ids(self) -> list[str]:
        """The members' ids in the order of their ranks; empty if the quorum is too large to tell them."""

    @property
    def lineage(self) -> str:
        """The history of the members that are up to date; empty if they tell none."""

    @property
    def draining(self) -> bool:
        """Whether the replica is to leave after this step."""

    @property
    def contributor_rank(self) -> int | None:
        """The replica's rank among those that contribute to the step; ``None`` if it does not."""

    @property
    def contributor_world_size(self) -> int:
        """The number of replicas that contribute to the step."""

class Event:
    """What a manager server tells a rank without being asked."""

    @property
    def kind(self) -> Literal["abort_epoch", "kill"]:
        """``abort_epoch``: end what is pending in the epoch and ask for the next quorum. ``kill``: an operator ends this replica."""

    @property
    def quorum_id(self) -> int | None:
        """The epoch that is over."""

    @property
    def reason(self) -> str:
        """Why."""

    @property
    def departed(self) -> list[str]:
        """Ids of replicas that are gone."""

class Watch:
    """The events of one rank, as its manager server tells them. The connection is made anew when it breaks."""

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; ``None`` if none comes in `timeout` seconds, or once the watch was closed."""

    def close(self) -> None:
        """Ends the watch, and calls of `next` that wait."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class Progress:
    """Tells a manager server that a rank's training moves."""

    def moved(self) -> None:
        """Notes that the training moved; the server hears of it soon."""

    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class LighthouseClient:
    """A client of a lighthouse (`url`; of several that share a job all, separated by commas), for tools and tests.

    Replicas ask through their `ManagerServer`. `credentials` is the folder of the job's credentials; without it that of ``OXCCL_CREDENTIALS``.
    `timeout` in seconds is for connecting. A client may be used from several threads at once.
    """

    def __new__(cls, url: str, *, timeout: float = 60.0, credentials: _Path | None = None) -> Self: ...
    def quorum(
        self,
        replica_id: str,
        *,
        address: str,
        store_address: str,
        step: int = 0,
        world_size: int = 1,
        shrink_only: bool = False,
        data: str = "",
        commit_failures: int = 0,
        timeout: float = 60.0,
    ) -> Quorum:
        """Asks for a quorum with this replica in it and waits for it; heartbeats are sent meanwhile.

        `address` is the URL of its manager server, `store_address` that of its store (``host:port``), and `data` JSON of the caller's choice.
        `Timeout` says for whom the lighthouse waits.
        """

    def heartbeat(self, replica_id: str, *, timeout: float = 60.0) -> None:
        """Says that a replica is alive. It counts only for replicas that asked for a quorum."""

    def leave(self, replica_id: str, reason: str = "", *, timeout: float = 60.0) -> None:
        """Says that a replica leaves, and why."""

    def drain(self, replica: str, reason: str = "", *, timeout: float = 60.0) -> list[str]:
        """Has a replica (its id, or its name) finish its step and leave. Gives the ids of the replicas that were told."""

    def evict(self, replica: str, reason: str = "", *, timeout: float = 60.0) -> list[str]:
        """Takes a replica out of the job now; it is refused until it is started again. Gives the ids of the replicas that were told."""

    def kill(self, replica: str, reason: str = "", *, timeout: float = 60.0) -> list[str]:
        """Ends a replica's processes. Gives the ids of the replicas that were told."""

    def status(self, *, timeout: float = 60.0) -> LighthouseStatus:
        """What the lighthouse's page shows; of several lighthouses the leading one's."""

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class ManagerClient:
    """A rank's client of its replica's `ManagerServer` at `url`.

    With credentials it speaks for the replica of `replica_id` to that replica's server, and without a `replica_id` for the operator. `timeout` in seconds is for connecting. A
    client may be used from several threads at once.
    """

    def __new__(cls, url: str, *, replica_id: str | None = None, timeout: float = 60.0, credentials: _Path | None = None) -> Self: ...
    def quorum(
        self,
        group_rank: int,
        step: int,
        *,
        checkpoint_metadata: str = "",
        shrink_only: bool = False,
        init_sync: bool = True,
        commit_failures: int = 0,
        lineage: str = "",
        last_quorum_id: int = 0,
        healed: bool = False,
        batches_committed: int = 0,
        is_last: bool = False,
        timeout: float = 60.0,
    ) -> QuorumResult:
        """Asks for the next quorum and waits for it, together with the other ranks of the replica.

        `step` and `init_sync` are the same on all ranks of the replica; `checkpoint_metadata` says where others fetch this rank's state from;
        `commit_failures` counts the steps in a row that did not commit, and more than 0 asks for a new epoch; `lineage`, `last_quorum_id`,
        `healed` and `batches_committed` describe the state; `is_last` says that the run ends with this step.

        `Timeout` names what was missing; an `Error` with `retryable` says that the lighthouse failed: ask again.
        """

    def should_commit(self, group_rank: int, step: int, vote: bool, *, quorum_id: int = 0, attempt: int = 0, timeout: float = 60.0) -> bool:
        """Votes, and waits until all ranks of the replica have: true if all votes were.

        `attempt` counts the tries at this step and epoch, alike on all ranks. The same vote may be cast again if the answer was lost.
        """

    def checkpoint_metadata(self, group_rank: int, *, timeout: float = 60.0) -> str:
        """What a rank of that replica said with its last quorum request."""

    def report(self, quorum_id: int, reason: str, *, suspects: Sequence[str] = (), timeout: float = 60.0) -> None:
        """Tells the lighthouse that the epoch failed: all its members are told to abort it. `suspects` are replica ids, for the log."""

    def leave(self, group_rank: int, *, timeout: float = 60.0) -> None:
        """Says that a rank leaves in good order, so that its end is no death."""

    def kill(self, reason: str, *, timeout: float = 60.0) -> None:
        """Ends the replica. For the operator, with credentials; refused to all others."""

    def watch(self, group_rank: int) -> Watch:
        """What the server tells this rank from now on; see `Watch.next`."""

    def progress(self, group_rank: int, *, every: float = 1.0) -> Progress:
        """Tells the server that the training moves, at most once in `every` seconds, whenever `Progress.moved` was called."""

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class Group:
    """Some or all ranks of a job, which call operations together.

    All methods may be called from any thread. Collectives run in the order of the calls, which must be the same on every rank; messages are
    in order for each peer, direction and tag.

    Each operation takes `timeout` in seconds (the group's if ``None``) and, with ``async_op=True``, returns a `Work` instead of blocking. The
    memory of an operation in flight must not be touched. `contribute=False` takes part in a reduction with its identity, uncounted in an average.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def backend(self) -> str:
        """The backend's name."""

    @property
    def name(self) -> str:
        """The group's name, for messages."""

    @property
    def epoch(self) -> int:
        """The number of the group's configuration."""

    @property
    def device(self) -> str:
        """The device that the group serves."""

    @property
    def error(self) -> Error | None:
        """The first failure. After one every operation is refused."""

    def capabilities(self) -> Capabilities:
        """What the group offers."""

    def traffic(self) -> Traffic:
        """Bytes moved so far."""

    def alloc(self, shape: int | Sequence[int], dtype: str = "f32") -> Memory:
        """Memory of zeros that the other ranks of this host read in place, where there is such memory; elsewhere it is ordinary memory.

        Operations on it, or on a part of it, send no copy to those ranks; the results are the same. It needs no other rank, may come before the group
        is connected, and outlives it. For what is used again and again: each page costs something when it is first written.
        """

    def configure(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        epoch: int = 1,
        prefix: str = "oxccl",
        name: str = "group",
        timeout: Limit = 60.0,
    ) -> None:
        """Meets the other ranks of `epoch` in `store` and connects; each epoch is larger than the one before.

        `store` is a `Store`, or an object with the methods of torch's stores. Operations of an earlier epoch end as aborted.
        """

    @overload
    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
        contribute: bool = True,
    ) -> None:
        """Every tensor becomes the reduction over all ranks, in place."""

    @overload
    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def broadcast(self, tensors: Tensors, root: int, *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """Every rank's tensors become the root's."""

    @overload
    def broadcast(self, tensors: Tensors, root: int, *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
        contribute: bool = True,
    ) -> None:
        """The root's tensor becomes the reduction; the others keep theirs."""

    @overload
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def all_gather(
        self,
        input: Tensor,
        outputs: Sequence[Tensor],
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """``outputs[r]`` becomes rank r's `input`; sizes may differ between ranks."""

    @overload
    def all_gather(self, input: Tensor, outputs: Sequence[Tensor], *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather_into(self, input: Tensors, output: Tensors, *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """`output` becomes the inputs of all ranks, one after the other."""

    @overload
    def all_gather_into(self, input: Tensors, output: Tensors, *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather_in_place(self, tensors: Tensors, *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """Part r of every tensor, which has one of the same size for each rank, becomes rank r's."""

    @overload
    def all_gather_in_place(self, tensors: Tensors, *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def gather(
        self,
        input: Tensor,
        outputs: Sequence[Tensor] | None = None,
        *,
        root: int,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """On the root ``outputs[r]`` becomes rank r's `input`; the others pass no outputs."""

    @overload
    def gather(
        self,
        input: Tensor,
        outputs: Sequence[Tensor] | None = None,
        *,
        root: int,
        timeout: Limit | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        inputs: Sequence[Tensor] | None = None,
        *,
        output: Tensor,
        root: int,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """`output` becomes the root's ``inputs[own rank]``; the others pass no inputs."""

    @overload
    def scatter(
        self,
        inputs: Sequence[Tensor] | None = None,
        *,
        output: Tensor,
        root: int,
        timeout: Limit | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
        contribute: bool = True,
    ) -> None:
        """`output` becomes the reduction over all ranks of their ``inputs[own rank]``; sizes may differ."""

    @overload
    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def reduce_scatter_into(
        self,
        input: Tensors,
        output: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
        contribute: bool = True,
    ) -> None:
        """`output` becomes this rank's part of the reduction of `input`."""

    @overload
    def reduce_scatter_into(
        self,
        input: Tensors,
        output: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def reduce_scatter_in_place(
        self,
        tensors: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
        contribute: bool = True,
    ) -> None:
        """This rank's part of every tensor, which has one of the same size for each rank, becomes the reduction of it.

        What is in the other parts afterwards is undefined.
        """

    @overload
    def reduce_scatter_in_place(
        self,
        tensors: Tensors,
        op: Reduction = "sum",
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def all_to_all(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """``outputs[r]`` becomes rank r's ``inputs[own rank]``; sizes may differ."""

    @overload
    def all_to_all(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_to_all_into(
        self,
        input: Tensor,
        output: Tensor,
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """As `all_to_all` on one tensor each; splits are in elements, one per rank, and none mean even ones."""

    @overload
    def all_to_all_into(
        self,
        input: Tensor,
        output: Tensor,
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        timeout: Limit | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def send(self, tensor: Tensor, peer: int, tag: int = 0, *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """Sends to `peer`; done when the memory may be reused."""

    @overload
    def send(self, tensor: Tensor, peer: int, tag: int = 0, *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def recv(
        self,
        tensor: Tensor,
        peer: int | None = None,
        tag: int = 0,
        *,
        timeout: Limit | None = None,
        async_op: Literal[False] = False,
    ) -> int:
        """Receives from `peer`, or from the first that sends with the tag; gives the sender's rank."""

    @overload
    def recv(
        self,
        tensor: Tensor,
        peer: int | None = None,
        tag: int = 0,
        *,
        timeout: Limit | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def batch(self, ops: Sequence[Send | Recv], *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """Sends and receives that progress together, in any order."""

    @overload
    def batch(self, ops: Sequence[Send | Recv], *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def barrier(self, *, timeout: Limit | None = None, async_op: Literal[False] = False) -> None:
        """Waits until every rank is here."""

    @overload
    def barrier(self, *, timeout: Limit | None = None, async_op: Literal[True]) -> Work: ...
    def monitored_barrier(self, *, wait_all: bool = False, timeout: Limit | None = None) -> None:
        """As `barrier`; at the deadline the error names ranks that are missing, all of them if `wait_all`."""

    def _set_timeout(self, timeout: Limit) -> None:
        """From now on operations whose call names no time may take `timeout`."""

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends all pending operations and refuses further ones; peers are told. Returns at once."""

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the group: waits for pending operations, and aborts what is left after `timeout` seconds."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

class World(Group):
    """The group of all ranks of a job, from which other groups are made."""

    @property
    def local_rank(self) -> int | None:
        """This rank's number among those of its host, where the launcher says so."""

    def new_group(
        self,
        ranks: Sequence[int],
        *,
        backend: str | None = None,
        timeout: float | None = None,
        options: Mapping[str, str | float | bool] | None = None,
        name: str | None = None,
    ) -> Group | None:
        """A group of `ranks`, in which rank ``ranks[i]`` is rank i; ``None`` on ranks that are not among them.

        What is not given is the world's: `backend` (such as ``cpu:gloo`` of a ``cpu:gloo,cuda:nccl`` world), `options` (all of them,
        if there are any), `timeout` (for making it and for its operations). `name` stands in messages. A call of all ranks, with the
        same arguments.
        """

    def split_group(
        self,
        partition: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout: float | None = None,
        options: Mapping[str, str | float | bool] | None = None,
        name: str | None = None,
    ) -> Group | None:
        """One group for each list of ranks; gives this rank's, or ``None`` if it is in no list.

        The other arguments are those of `new_group`. A call of all ranks, with the same arguments.
        """

    def connect(self, group: Group, ranks: Sequence[int] | None = None, *, timeout: float | None = None) -> bool:
        """Connects `group`, which has met no rank yet, among `ranks` (all, if none are named), in that order.

        For a `QuantizedGroup`, or a group of another backend. False on ranks that are not among them. A call of all ranks, with the same list.
        """

class QuantizedGroup(Group):
    """A group whose reductions travel in fewer bytes: sums and averages of f32, f16 and bf16.

    It has met no rank yet: `World.connect` or `configure` connects it. `over` is the group that carries the bytes, from `unconfigured`,
    which must not be used directly any more; without one it is the CPU's default.

    `format` is ``int8``, ``fp8``, ``int4`` (rotated), ``int2`` (with `error_feedback` only), ``f16``, ``bf16``, a full name such as
    ``int8-b32``, or ``auto``. With `accuracy` ``best`` values are rounded once instead of twice from three ranks on, for more bytes. With `moves`
    ``quantized`` all-gathers and broadcasts of floats travel so too. A `seed` rounds stochastically. With `error_feedback` what rounding
    takes is kept and added the next time; each step is then between `begin` and `commit` or `rollback`. Ranks that differ in `format`,
    `accuracy` or `moves` get a ``Mismatch`` when they connect.
    """

    def __new__(
        cls,
        format: str = "auto",
        *,
        over: Group | None = None,
        accuracy: Literal["economic", "best"] = "economic",
        moves: Literal["exact", "quantized"] = "exact",
        error_feedback: bool = False,
        seed: int | None = None,
        timeout: float = 60.0,
    ) -> Self: ...
    @property
    def format(self) -> str:
        """The format's full name."""

    @property
    def has_error_feedback(self) -> bool:
        """Whether it keeps what rounding takes."""

    @property
    def non_finite(self) -> int:
        """How many values that are not finite this rank has put into quantised operations so far."""

    def start_round(self, round: int) -> None:
        """Names the round that the next calls belong to: with the same seed and round, the same calls draw the same random numbers."""

    def begin(self, scope: str = "step") -> None:
        """Begins a step of error feedback. Steps with the same `scope` and the same operations share residuals."""

    def commit(self) -> None:
        """Ends the step: it counted, and its residuals stay."""

    def rollback(self) -> None:
        """Ends the step: it did not count, and its residuals are those from before."""

def init(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    device: str = "cpu",
    timeout: Limit = 60.0,
    isolated: bool = False,
    options: Mapping[str, str | float | bool] | None = None,
) -> World:
    """Meets the other ranks of the job and connects.

    Without an `address` the launcher's variables say which rank this is and where rank 0 listens (torchrun, Open MPI, MPICH, Slurm). An
    address is ``tcp://HOST:PORT`` or ``file:///PATH``, with `rank` and `world_size` beside it or as ``?rank=R&world_size=N``.

    `backend` is a name (``gloo``, ``xccl``, a plugin's) or one for each kind of device, as in ``cpu:gloo,cuda:nccl``; without one the
    default of the device. `timeout` in seconds is for this call and for operations that name none. `isolated` runs the backend in a child process, so
    that a library that cannot be aborted can be killed. `options` are the
    backend's: what it does not honour it refuses, naming what it does.
    """

def unconfigured(
    *,
    backend: str | None = None,
    device: str = "cpu",
    timeout: Limit = 60.0,
    isolated: bool = False,
    options: Mapping[str, str | float | bool] | None = None,
) -> Group:
    """A group of a backend that has met no rank yet: `Group.configure` connects it, again and again."""

class _States(Protocol):
    """The training state, asked for and handed over inside the calls of a replica, on the thread that calls."""

    def save(self) -> tuple[list[tuple[str, list[int], Any]], str]: ...
    def load(self, tensors: list[tuple[str, str, list[int], bytearray]], tree: str) -> None: ...

class Participation:
    """A replica's part in the present quorum."""

    @property
    def epoch(self) -> int:
        """The number of the group's configuration."""

    @property
    def step(self) -> int:
        """The step that this quorum works on."""

    @property
    def replica_rank(self) -> int:
        """This replica's rank among the members."""

    @property
    def replica_world_size(self) -> int:
        """The number of members, healing ones included."""

    @property
    def contributor_rank(self) -> int | None:
        """The place among those that contribute; None if this replica does not."""

    @property
    def contributors(self) -> int:
        """The number of replicas that contribute."""

    @property
    def healed_bytes(self) -> int | None:
        """The size of the state that this replica took over just now, in bytes."""

    @property
    def healed_seconds(self) -> float | None:
        """How long that took."""

    @property
    def members(self) -> list[str] | None:
        """The ids of the members; None where there are too many to tell."""

class Round:
    """What a round of DiLoCo was like."""

    @property
    def step(self) -> int:
        """The step that was committed; 0 is the first synchronisation."""

    @property
    def epoch(self) -> int:
        """The epoch in which it was committed."""

    @property
    def members(self) -> int:
        """The members of that quorum."""

    @property
    def contributors(self) -> int:
        """How many replicas were averaged; 0 in a round without data."""

    @property
    def failed_attempts(self) -> int:
        """Attempts that did not commit before this one."""

    @property
    def healed(self) -> bool:
        """This replica took its state over in this round."""

    @property
    def sync_seconds(self) -> float:
        """Time spent in quorums, healing and waiting, over all attempts."""

class _Replica:
    def __new__(
        cls,
        group: Group,
        name: str,
        lighthouse: str | None,
        *,
        group_rank: int = 0,
        group_world_size: int = 1,
        store: Any = None,
        bind: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        min_replicas: int = 1,
        fixed_with_spares: bool = False,
        init_sync: bool = True,
        max_retries: int | None = None,
        timeout: float = 60.0,
        connect_timeout: float = 20.0,
        heartbeat_interval: float = 0.1,
        progress_timeout: float = 120.0,
        max_state_bytes: int | None = None,
        credentials: str | PathLike[str] | None = None,
        insecure: bool = False,
    ) -> Self: ...
    @property
    def replica_id(self) -> str: ...
    def start_quorum(self, states: _States, timeout: float) -> Participation: ...
    def begin_quorum(self, timeout: float) -> bool: ...
    def await_quorum(self) -> Participation: ...
    def all_reduce(self, tensors: Tensors, op: Reduction) -> Work | Error: ...
    def should_commit(self, timeout: float) -> bool: ...
    def report_error(self, text: str) -> None: ...
    @property
    def error(self) -> Error | None: ...
    @property
    def current_step(self) -> int: ...
    @property
    def batches_committed(self) -> int: ...
    @property
    def lineage(self) -> str: ...
    @property
    def draining(self) -> bool: ...
    def restore(self, step: int, lineage: str, batches_committed: int) -> None: ...
    def set_shrink_only(self, on: bool) -> None: ...
    def set_last(self, is_last: bool) -> None: ...
    def progress(self) -> None: ...
    def traffic(self) -> Traffic: ...
    def leave(self, timeout: float) -> None: ...
    def close(self) -> None: ...

class _Checkpoints:
    def __new__(cls, root: str | PathLike[str], replica: int, replicas: int, keep: int, timeout: float) -> Self: ...
    def flush(self, timeout: float) -> None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def error(self) -> Error | None: ...

class _Diloco:
    def __new__(
        cls,
        replica: _Replica,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        fragments: Sequence[Sequence[int]],
        *,
        sync_every: int,
        delay: int = 0,
        mixing: float = 0.0,
        eager: bool = False,
        outer: tuple[str, float, float] = ("nesterov", 0.7, 0.9),
        bucket_elements: int = 262144,
        rounds: int | None = None,
        round_timeout: float = 600.0,
        feedback: QuantizedGroup | None = None,
    ) -> Self: ...
    def begin(self, states: _States) -> list[Round]: ...
    def after_inner_step(self, states: _States) -> list[Round]: ...
    def finish(self, states: _States) -> None: ...
    def save(self, states: _States, checkpoints: _Checkpoints) -> bool: ...
    def restore(self, states: _States, checkpoints: _Checkpoints) -> tuple[int | None, list[str]]: ...
    def global_hash(self) -> str: ...

def _know_torch(tensor: type[Any], dtypes: Sequence[tuple[Any, str]]) -> None: ...
def backends() -> list[tuple[str, str | None]]:
    """The backends that this process knows, plugins included: each with ``None``, or why it cannot be used here."""

def leaked_bytes() -> int:
    """Bytes that were never freed on purpose, since an operation might still touch them."""

def _end() -> None: ...
def _run_child_if_asked() -> None: ...
def _command(arguments: Sequence[str], again: Sequence[str]) -> int: ...
