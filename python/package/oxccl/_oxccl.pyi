"""The extension module behind `oxccl`."""

from collections.abc import Generator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, overload

from typing_extensions import Buffer, Self

from oxccl._errors import Error

class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...

Tensor: TypeAlias = Buffer | _DLPack
"""Whatever lends contiguous host memory: NumPy arrays, buffers, and tensors with DLPack (torch, JAX)."""
Tensors: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or a list or tuple of them that counts as one operation."""
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

    def wait(self, timeout: float | None = None) -> None:
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

    def configure(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        epoch: int = 1,
        prefix: str = "oxccl",
        name: str = "group",
        timeout: float = 60.0,
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
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def broadcast(self, tensors: Tensors, root: int, *, timeout: float | None = None, async_op: Literal[False] = False) -> None:
        """Every rank's tensors become the root's."""

    @overload
    def broadcast(self, tensors: Tensors, root: int, *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: Reduction = "sum",
        *,
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def all_gather(
        self,
        input: Tensor,
        outputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """``outputs[r]`` becomes rank r's `input`; sizes may differ between ranks."""

    @overload
    def all_gather(self, input: Tensor, outputs: Sequence[Tensor], *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather_into(self, input: Tensors, output: Tensors, *, timeout: float | None = None, async_op: Literal[False] = False) -> None:
        """`output` becomes the inputs of all ranks, one after the other."""

    @overload
    def all_gather_into(self, input: Tensors, output: Tensors, *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def gather(
        self,
        input: Tensor,
        outputs: Sequence[Tensor] | None = None,
        *,
        root: int,
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        inputs: Sequence[Tensor] | None = None,
        *,
        output: Tensor,
        root: int,
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: Reduction = "sum",
        *,
        timeout: float | None = None,
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
        timeout: float | None = None,
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
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
        contribute: bool = True,
    ) -> Work: ...
    @overload
    def all_to_all(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """``outputs[r]`` becomes rank r's ``inputs[own rank]``; sizes may differ."""

    @overload
    def all_to_all(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        timeout: float | None = None,
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
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def send(self, tensor: Tensor, peer: int, tag: int = 0, *, timeout: float | None = None, async_op: Literal[False] = False) -> None:
        """Sends to `peer`; done when the memory may be reused."""

    @overload
    def send(self, tensor: Tensor, peer: int, tag: int = 0, *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def recv(
        self,
        tensor: Tensor,
        peer: int | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
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
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def batch(self, ops: Sequence[Send | Recv], *, timeout: float | None = None, async_op: Literal[False] = False) -> None:
        """Sends and receives that progress together, in any order."""

    @overload
    def batch(self, ops: Sequence[Send | Recv], *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def barrier(self, *, timeout: float | None = None, async_op: Literal[False] = False) -> None:
        """Waits until every rank is here."""

    @overload
    def barrier(self, *, timeout: float | None = None, async_op: Literal[True]) -> Work: ...
    def monitored_barrier(self, *, wait_all: bool = False, timeout: float | None = None) -> None:
        """As `barrier`; at the deadline the error names ranks that are missing, all of them if `wait_all`."""

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

    def new_group(self, ranks: Sequence[int], *, timeout: float | None = None) -> Group | None:
        """A group of `ranks`, in which rank ``ranks[i]`` is rank i; ``None`` on ranks that are not among them.

        A call of all ranks, with the same list.
        """

    def split_group(self, partition: Sequence[Sequence[int]], *, timeout: float | None = None) -> Group | None:
        """One group for each list of ranks; gives this rank's, or ``None`` if it is in no list.

        A call of all ranks, with the same lists.
        """

def init(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    device: str = "cpu",
    timeout: float = 60.0,
    isolated: bool = False,
    options: Mapping[str, str] | None = None,
) -> World:
    """Meets the other ranks of the job and connects.

    Without an `address` the launcher's variables say which rank this is and where rank 0 listens (torchrun, Open MPI, MPICH, Slurm). An
    address is ``tcp://HOST:PORT`` or ``file:///PATH``, with `rank` and `world_size` beside it or as ``?rank=R&world_size=N``.

    `backend` is a name (``gloo``, ``xccl``, a plugin's) or one for each kind of device, as in ``cpu:gloo,cuda:nccl``; without one the
    default of the device. `timeout` in seconds is for this call and for operations that name none. `isolated` runs the backend in a child process, so
    that a library that cannot be aborted can be killed. `options` are the backend's: what it does not honour it refuses.
    """

def unconfigured(
    *,
    backend: str | None = None,
    device: str = "cpu",
    timeout: float = 60.0,
    isolated: bool = False,
    options: Mapping[str, str] | None = None,
) -> Group:
    """A group of a backend that has met nobody yet: `Group.configure` connects it, again and again."""

def _know_torch(tensor: type[Any], dtypes: Sequence[tuple[Any, str]]) -> None: ...
def backends() -> list[tuple[str, str | None]]:
    """The backends that this process knows, plugins included: each with ``None``, or why it cannot be used here."""

def leaked_bytes() -> int:
    """Bytes that were never freed on purpose, since an operation might still touch them."""

def _end() -> None: ...
def _run_child_if_asked() -> None: ...
