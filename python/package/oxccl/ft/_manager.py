"""One rank of one replica of a fault-tolerant job."""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

import oxccl
from oxccl import _oxccl
from oxccl.ft import _state
from oxccl.ft._work import Work
from oxccl.torch._calls import reduction

LoadFn = Callable[[Any], Any]
SaveFn = Callable[[], Any]
Time = timedelta | float


def seconds(time: Time) -> float:
    """A time as seconds."""
    return time.total_seconds() if isinstance(time, timedelta) else float(time)


def _bracketed(host: str) -> str:
    """The host as it stands before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _listens_at(hostname: str | None) -> str:
    """Where the manager listens that others reach as `hostname`."""
    if hostname is None:
        return "127.0.0.1"
    return "[::]" if ":" in hostname else "0.0.0.0"


def ProcessGroupGloo(timeout: Time = timedelta(seconds=60)) -> oxccl.Group:
    """The group that a manager uses if it is given none, by torchft's name for it."""
    return oxccl.unconfigured(backend="gloo", timeout=seconds(timeout))


class WorldSizeMode(Enum):
    """How the number of contributing replicas behaves."""

    DYNAMIC = 0
    """Every healthy replica contributes."""
    FIXED_WITH_SPARES = 1
    """At most `min_replica_size` contribute; further ones stand by with the state."""


class _Pass(Protocol):
    """A backward pass whose gradients were reduced in a step."""

    def _is_whole(self) -> bool:
        """Whether they are still as the reductions left them."""

    def _again(self) -> bool:
        """Sends them again, in a quorum that stands. False if they are not there any more."""


class States:
    """The training state by keys, as it travels: `_oxccl._Replica` asks for it, and hands it over, inside its calls."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.functions: dict[str, tuple[LoadFn, SaveFn]] = {}
        self.meshes: list[Any] = []
        """Those whose `DTensor`s travel."""
        self._torn: BaseException | None = None
        """What ended a load in the middle."""

    def check(self) -> None:
        """Raises if a state was taken over in part: no step has such a state, so that it may neither be trained on nor travel."""
        if self._torn is not None:
            why = f"{type(self._torn).__name__}: {self._torn}"
            error = oxccl.Error(f"this replica's state was written in part only and is of no step ({why}): start the replica again, so that it heals")
            error.kind = "InvalidState"
            raise error from self._torn

    def save(self) -> tuple[list[_state.Memory], str]:
        """Called on the training thread when another replica heals from this one."""
        with torch.no_grad():
            states = {key: save() for key, (_, save) in self.functions.items()}
            return _state.encode(states, allow_pickle=self.allow_pickle, meshes=self.meshes)

    def load(self, tensors: list[_state.Loaded], tree: str) -> None:
        """Called on the training thread when this replica heals."""
        self.check()
        found = _state.decode(tensors, tree, allow_pickle=self.allow_pickle, meshes=self.meshes)
        if found.keys() != self.functions.keys():
            theirs, ours = sorted(found.keys() - self.functions.keys()), sorted(self.functions.keys() - found.keys())
            raise ValueError(f"the parts of the state differ: only there {theirs}, only here {ours}; all replicas register the same keys")
        with torch.no_grad():
            try:
                for key, (load, _) in self.functions.items():
                    load(found[key])
            except BaseException as error:
                self._torn = error
                raise


class Manager:
    """One rank of one replica: agrees with the others on who takes part in a step, heals this replica, and decides whether the step counts.

    Arguments that mean the same as torchft's are called the same; times may also be given in seconds.

    Args:
        pg: the group that carries the reductions, which the manager connects: one of `oxccl.unconfigured`, an `oxccl.QuantizedGroup`, a backend's
            name, or None for the usual one.
        load_state_dict: takes over the state that `state_dict` gave on another replica.
        state_dict: everything that the next step depends on: dicts, lists and tuples of tensors, numbers, texts, bytes and None.
        min_replica_size: a step commits with at least so many replicas.
        use_async_quorum: look for the quorum while the forward pass runs. A new replica's first one, and one after a step that failed, comes first.
        timeout: for one reduction, one connect of the group, one transfer of state.
        quorum_timeout: for one quorum, and for one vote.
        connect_timeout: for reaching the servers at the start.
        rank: this process in its replica; by default ``RANK``, or 0.
        world_size: the processes of this replica; by default ``WORLD_SIZE``, or 1.
        world_size_mode: whether all replicas contribute, or `min_replica_size` of them.
        store_addr: with `store_port`, the store in which the ranks of one replica meet; by default ``MASTER_ADDR`` and ``MASTER_PORT``. A replica of
            one process needs none.
        lighthouse_addr: by default ``OXCCL_LIGHTHOUSE``, or ``TORCHFT_LIGHTHOUSE``.
        replica_id: the replica's name, the same in each of its incarnations; by default a random one.
        port: of the manager server; 0 takes a free one.
        hostname: by which other machines reach this one, which then listens on all its addresses. By default only this machine reaches it.
        heartbeat_interval: between two signs of incarnation to the lighthouse.
        checkpoint_transport: must be None: the state travels over a transport that is built in.
        init_sync: at step 0 all replicas take the state of one.
        max_retries: after so many attempts in a row that did not commit the next one raises.
        quorum_retries: taken and not used: a quorum that fails is asked for again until `quorum_timeout`.
        store: instead of an address, the store itself: one of `oxccl` or of torch.
        max_state_bytes: the largest state that is taken over from another replica; by default as much as this machine has memory.
        allow_pickle: let other values than the named ones travel by pickle. Who is a replica can run code in all others then.
        credentials: the folder of this job's credentials; by default ``OXCCL_CREDENTIALS``.
        insecure: without credentials, listen where other machines reach it.

    """

    def __init__(
        self,
        pg: oxccl.Group | str | None = None,
        load_state_dict: LoadFn | None = None,
        state_dict: SaveFn | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: Time = timedelta(seconds=60),
        quorum_timeout: Time = timedelta(seconds=60),
        connect_timeout: Time = timedelta(seconds=60),
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: Time = timedelta(milliseconds=100),
        checkpoint_transport: None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
        *,
        store: Any = None,
        max_state_bytes: int | None = None,
        allow_pickle: bool = False,
        credentials: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if checkpoint_transport is not None:
            raise ValueError("checkpoint_transport is given: the state travels over a transport that is built in; leave it out")
        if (load_state_dict is None) != (state_dict is None):
            raise ValueError("load_state_dict and state_dict belong together: give both, or neither")
        self._states = States(allow_pickle)
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._pg = oxccl.unconfigured(backend=pg) if pg is None or isinstance(pg, str) else pg
        self._timeout = seconds(timeout)
        self._quorum_timeout = seconds(quorum_timeout)
        self._use_async_quorum = use_async_quorum
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if store is None and self._world_size > 1:
            address = store_addr or os.environ.get("MASTER_ADDR")
            number = store_port or os.environ.get("MASTER_PORT")
            if address is None or number is None:
                raise ValueError(f"a replica of {self._world_size} ranks needs a store to meet in: give store, or store_addr and store_port")
            store = oxccl.TcpStore(f"{_bracketed(address)}:{number}")
        lighthouse = lighthouse_addr or os.environ.get("OXCCL_LIGHTHOUSE") or os.environ.get("TORCHFT_LIGHTHOUSE")
        if lighthouse is None and self._rank == 0:
            raise ValueError("no lighthouse is known: give lighthouse_addr, or set OXCCL_LIGHTHOUSE")
        self._replica = _oxccl._Replica(
            self._pg,
            replica_id or uuid.uuid4().hex,
            lighthouse,
            group_rank=self._rank,
            group_world_size=self._world_size,
            store=store,
            bind=f"{_listens_at(hostname)}:{port or 0}",
            advertise_host=hostname,
            min_replicas=min_replica_size,
            fixed_with_spares=world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
            init_sync=init_sync,
            max_retries=max_retries,
            timeout=self._timeout,
            connect_timeout=seconds(connect_timeout),
            heartbeat_interval=seconds(heartbeat_interval),
            progress_timeout=max(120.0, 2 * self._timeout),
            max_state_bytes=max_state_bytes,
            credentials=credentials,
            insecure=insecure,
        )
        self._part: _oxccl.Participation | None = None
        self._is_begun = False
        """A quorum was asked for, and not finished with the state."""
        self._may_begin = False
        """The next quorum may be looked for beside the forward pass."""
        self._has_others = False
        """The program reduced something itself in this step."""
        self._pass: _Pass | None = None
        """The backward pass of this step whose gradients were reduced."""

    # -- the state

    def register_state_dict_fn(self, key: str, load_state_dict: LoadFn, state_dict: SaveFn) -> None:
        """Adds a part of the state under a key of its own. All replicas register the same keys, before the first quorum."""
        if key in self._states.functions:
            raise ValueError(f"the state '{key}' is registered already")
        self._states.functions[key] = (load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: LoadFn, state_dict: SaveFn) -> None:
        """Sets the part of the state that the constructor takes."""
        self._states.functions["default"] = (load_state_dict, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Where the state stands, for a checkpoint on disk: save it with the state, and load it before the first quorum."""
        return {"step": self.current_step(), "batches_committed": self.batches_committed(), "lineage": self._replica.lineage}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint on disk. Before the first quorum."""
        self._replica.restore(int(state_dict["step"]), str(state_dict.get("lineage", "")), int(state_dict["batches_committed"]))

    # -- a step

    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: Time | None = None) -> None:
        """Agrees on who takes part in the step. With `use_async_quorum` it returns at once, where it may.

        Raises `oxccl.Timeout` or another `oxccl.Error` if no quorum came about; it may be called again then. One of kind ``InvalidState`` after a
        state that was taken over in part.
        """
        self._states.check()
        if not allow_heal:
            raise ValueError("allow_heal=False: a replica that is behind always heals here, since a step of an older state would not count")
        self._is_begun = False
        self._has_others = False
        self._pass = None
        self._replica.set_shrink_only(shrink_only)
        limit = self._quorum_timeout if timeout is None else seconds(timeout)
        if self._use_async_quorum and self._may_begin and self._replica.begin_quorum(limit):
            self._part = None
            self._is_begun = True
            return
        self._part = self._replica.start_quorum(self._states, limit)
        # Until this step has committed.
        self._may_begin = False

    def wait_quorum(self) -> None:
        """Waits for the quorum. A replica that is behind heals before the vote."""
        if self._part is None:
            if not self._is_begun:
                raise RuntimeError("there is no quorum: call start_quorum first")
            self._part = self._replica.await_quorum()

    def _finish_quorum(self) -> None:
        """The part of a quorum that needs the state: others heal from this replica, or this one does."""
        if self._is_begun:
            self._is_begun = False
            self._part = self._replica.start_quorum(self._states, self._quorum_timeout)

    def allreduce(self, tensor: Any, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG) -> Work:
        """Reduces `tensor` in place over the replicas; an average counts those that contribute.

        Never raises for what happens to other replicas: that shows in the work, in `errored` and in the vote.
        """
        if should_quantize and not isinstance(self._pg, oxccl.QuantizedGroup):
            raise ValueError("should_quantize=True: the group decides how values travel; give the manager pg=oxccl.QuantizedGroup('int8')")
        self._has_others = True
        return self._reduce(tensor, reduction(reduce_op))

    def _reduce(self, tensor: Any, op: _oxccl.Reduction = "avg") -> Work:
        values = tensor.detach()
        lent = values if values.device.type == "cpu" and values.is_contiguous() else values.to("cpu").contiguous()

        def after() -> None:
            if lent is not values:
                values.copy_(lent)

        try:
            self.wait_quorum()
        except oxccl.Error as error:
            if not error.retryable:
                raise
            return Work(None, tensor, self._finish_quorum, after, error)
        found = self._replica.all_reduce(lent, op)
        if isinstance(found, Exception):
            return Work(None, tensor, self._finish_quorum, after, found)
        return Work(found, tensor, self._finish_quorum, after, None)

    def should_commit(self, timeout: Time | None = None) -> bool:
        """Waits for the reductions of the step and decides: True, and the step counts; False, and nothing of it is to be applied.

        Raises after `max_retries` attempts in a row that did not commit, and for what no other attempt would change.
        """
        try:
            self._finish_quorum()
            committed = self._replica.should_commit(self._quorum_timeout if timeout is None else seconds(timeout))
        except oxccl.Error as error:
            if not error.retryable:
                raise
            committed = False
        self._may_begin = committed
        return committed

    def _may_repeat(self) -> bool:
        """Whether a lost step can be done again with its gradients alone: the same reductions as in the others' steps, in the same order."""
        # The ranks of one replica would have to do so together.
        return self._world_size == 1 and not self._has_others

    def _repeat(self) -> bool:
        """After a step that did not commit: sends its gradients again in a new quorum. False if the step is to be left out."""
        lost = self._pass
        if lost is None or not self._may_repeat() or not lost._is_whole():
            return False
        self._start_again(lost)
        return lost._again()

    def _begins_pass(self, begun: _Pass) -> None:
        """A backward pass begins to reduce. After another one in the same step, gradients alone would not do that step again."""
        if self._pass is not None:
            self._has_others = True
        self._pass = begun

    def _start_again(self, lost: _Pass) -> None:
        """A new quorum for the pass of a step that did not commit."""
        self.start_quorum()
        self._pass = lost

    def report_error(self, e: Exception) -> None:
        """Makes the vote on this step a no."""
        self._replica.report_error(f"{type(e).__name__}: {e}")

    def errored(self) -> Exception | None:
        """The first error of this step."""
        return self._replica.error

    def wrap_future(self, fut: Any, default: Any, timeout: Time | None = None) -> Any:
        """A future that never fails: an error of `fut` counts in the vote, and `default` takes its place."""
        if timeout is not None:
            warnings.warn("wrap_future: the timeout is not used; give the operation itself one", stacklevel=2)
        done: torch.futures.Future[Any] = torch.futures.Future()

        def settle(ended: Any) -> None:
            try:
                value = ended.value()
            except Exception as error:
                # Refused while a call of the manager's waits, and after its end: then there is no vote that it could count in.
                with contextlib.suppress(oxccl.Error):
                    self.report_error(error)
                value = default
            done.set_result(value)

        fut.add_done_callback(settle)
        return done

    # -- what holds now

    def current_step(self) -> int:
        """The number of committed steps, those that led to a state that was taken over included."""
        return self._replica.current_step

    def batches_committed(self) -> int:
        """How many batches led to the state, over all replicas."""
        return self._replica.batches_committed

    def _participation(self) -> _oxccl.Participation:
        self.wait_quorum()
        assert self._part is not None
        return self._part

    def num_participants(self) -> int:
        """How many replicas contribute to this step."""
        return self._participation().contributors

    def participating_rank(self) -> int | None:
        """This replica's place among those that contribute; None if it does not: it has just healed, or stands by."""
        return self._participation().contributor_rank

    def is_participating(self) -> bool:
        """Tells whether this replica contributes to this step."""
        return self.participating_rank() is not None

    def is_draining(self) -> bool:
        """An operator told this replica to leave: call `shutdown` after the step."""
        return self._replica.draining

    def replica_id(self) -> str:
        """The id of this incarnation: the replica's name and a random part."""
        return self._replica.replica_id

    # -- the end

    def shutdown(self, wait: bool = True) -> None:
        """Leaves in good order, so that no other waits for this replica. A second call does nothing."""
        self._replica.leave(5.0 if wait else 1.0)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        """Leaves in good order, unless an exception ends the block: that is a death to the others."""
        if kind is None:
            self.shutdown()
        else:
            self._replica.close()
