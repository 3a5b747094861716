"""The manager of `oxccl.ft`, and the state that travels."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftjobs
import oxccl


def travelled(state: dict[str, Any], **options: Any) -> Any:
    """What comes out on another replica."""
    import torch

    from oxccl.ft import _state
    from oxccl.torch._calls import _DTYPES

    names = {dtype: name for dtype, name in _DTYPES}
    tensors, tree = _state.encode(state, **options)
    sent = []
    for name, shape, memory in tensors:
        flat = (
            memory
            if isinstance(memory, torch.Tensor)
            else torch.frombuffer(memory, dtype=torch.uint8)
            if memory
            else torch.empty(0, dtype=torch.uint8)
        )
        raw = bytearray(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else bytearray()
        sent.append((name, names[flat.dtype], shape, raw))
    return _state.decode(sent, tree, **options)


def same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.detach().reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8)))
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_any_state_of_plain_values_travels_bit_by_bit() -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rest": [1, -(2**70), 0.1, float("inf"), float("nan"), -0.0, True, None, "Ü/x", b"", b"\x00\xff", (1, (2,)), {}, {1: 2, "1": 3, None: 4}],
        "kinds": [torch.arange(4).to(d) for d in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.uint64, torch.complex64)],
        "shapes": [torch.zeros(0, 3), torch.tensor(5.0), torch.arange(6).reshape(2, 3).t(), torch.zeros(0, dtype=torch.complex128)],
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
    }
    assert same(travelled(state), state)
    assert same(travelled({"o": OrderedDict(x=1)}), {"o": {"x": 1}})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda torch: {"m": {"x": [1, object()]}}, "m/x/1 is of type builtins.object"),
        (lambda torch: {"m": {(1, 2): 3}}, "m has a key of type tuple"),
        (lambda torch: {"m": torch.zeros(2, 2).to_sparse()}, "m is a tensor of layout torch.sparse_coo"),
        (lambda torch: {"m": torch.zeros(2, device="meta")}, "on meta"),
        (lambda torch: {"m": {"s": {1, 2}}}, "m/s is of type builtins.set"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(make: Callable[[Any], dict[str, Any]], told: str) -> None:
    import torch

    with pytest.raises(TypeError, match=told):
        travelled(make(torch))


def test_pickle_only_if_asked_on_both_sides() -> None:
    from oxccl.ft import _state

    state = {"m": {"s": {1, 2}}}
    assert travelled(state, allow_pickle=True) == state
    tensors, tree = _state.encode(state, allow_pickle=True)
    with pytest.raises(TypeError, match="m/s came as pickle"):
        _state.decode([(name, "u8", shape, memory) for name, shape, memory in tensors], tree)


class Replica(threading.Thread):
    """A replica on a thread: steps that each add the average of `value` over the replicas."""

    def __init__(self, name: str, lighthouse: str, value: float, steps: int, **options: Any) -> None:
        import torch

        super().__init__()
        self.x = torch.full((3,), value * 100)
        self.value = value
        self.steps = steps
        self.error: BaseException | None = None
        self.seen: list[tuple[int, int]] = []
        self.make = (name, lighthouse, options)

    def run(self) -> None:
        import torch

        from oxccl import ft

        name, lighthouse, options = self.make
        try:
            with ft.Manager(
                options.pop("group", None),
                self.x.copy_,
                lambda: self.x,
                replica_id=name,
                lighthouse_addr=lighthouse,
                timeout=20,
                quorum_timeout=30,
                **options,
            ) as manager:
                while manager.current_step() < self.steps:
                    manager.start_quorum()
                    mean = torch.full((3,), self.value)
                    work = manager.allreduce(mean)
                    self.seen.append((manager.num_participants(), manager.current_step()))
                    work.wait()
                    if manager.should_commit():
                        self.x += mean
                self.batches = manager.batches_committed()
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_replicas_start_equal_average_over_contributors_and_end_equal(use_async_quorum: bool) -> None:
    with oxccl.Lighthouse(min_replicas=2) as lighthouse:
        replicas = [
            Replica(name, lighthouse.address, value, 4, min_replica_size=2, use_async_quorum=use_async_quorum)
            for name, value in (("a", 1.0), ("b", 3.0))
        ]
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join(ftjobs.LIMIT)
    assert [r.error for r in replicas] == [None, None]
    first, second = (r.x.tolist() for r in replicas)
    assert first == second
    # At step 0 one of them had just taken the other's state: only the other's value counted.
    assert first[0] in (100 + 1 + 3 * 2, 300 + 3 + 3 * 2)
    assert replicas[0].seen[1:] == [(2, 1), (2, 2), (2, 3)]
    assert [r.batches for r in replicas] == [7, 7]


def test_a_quantised_group_carries_the_reductions() -> None:
    with oxccl.Lighthouse(min_replicas=2) as lighthouse:
        replicas = [
            Replica(name, lighthouse.address, value, 3, min_replica_size=2, init_sync=False, group=oxccl.QuantizedGroup("int8"))
            for name, value in (("a", 0.25), ("b", 3.0))
        ]
        replicas[1].x.copy_(replicas[0].x)
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join(ftjobs.LIMIT)
    assert [r.error for r in replicas] == [None, None]
    assert replicas[0].x.tolist() == replicas[1].x.tolist()
    assert replicas[0].x.tolist() == pytest.approx([25 + 3 * 1.625] * 3, rel=0.02)


def test_a_state_that_is_refused_ends_the_replica_and_says_why() -> None:
    from oxccl import ft

    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse:
        good = Replica("a", lighthouse.address, 1.0, 1)
        good.daemon = True

        def load(_: Any) -> None:
            raise KeyError("not mine")

        def save() -> Any:
            return object()

        good.start()
        manager = ft.Manager(None, load, save, replica_id="b", lighthouse_addr=lighthouse.address, quorum_timeout=30, timeout=10)
        # Whichever of the two is the source at step 0, this one's state is of no use.
        with pytest.raises(oxccl.Error, match=r"not mine|default is of type builtins\.object") as raised:
            for _ in range(3):
                manager.start_quorum()
                manager.should_commit()
        assert isinstance(raised.value.__cause__, (KeyError, TypeError))
        manager._replica.close()
        good.join(ftjobs.LIMIT)
        assert not good.is_alive()
        assert good.error is None


def test_a_state_that_was_taken_over_in_part_is_not_trained_on() -> None:
    import torch

    from oxccl import ft

    model = torch.zeros(3)
    is_full = False

    def load(x: Any) -> None:
        model.copy_(x)
        if is_full:
            raise MemoryError("no room for the optimizer")

    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse:
        other = Replica("a", lighthouse.address, 1.0, 1 << 30)
        other.daemon = True
        other.start()

        def step(manager: ft.Manager) -> None:
            manager.start_quorum()
            manager.allreduce(torch.zeros(3)).wait()
            manager.should_commit()

        def make() -> ft.Manager:
            return ft.Manager(None, load, lambda: model, replica_id="b", lighthouse_addr=lighthouse.address, quorum_timeout=30, timeout=10)

        with make() as manager:
            while manager.current_step() < 2:
                step(manager)
            saved = manager.state_dict()
        # It comes back from its checkpoint, and is behind.
        seen, deadline = len(other.seen), time.monotonic() + ftjobs.LIMIT
        while len(other.seen) < seen + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        is_full = True
        manager = make()
        manager.load_state_dict(saved)
        with pytest.raises(oxccl.Error, match=r"of no step \(MemoryError: no room for the optimizer\)") as raised:
            for _ in range(5):
                step(manager)
        assert raised.value.kind == "InvalidState"
        manager.shutdown()
        other.steps = 0
        other.join(ftjobs.LIMIT)
        assert other.error is None


def test_a_future_without_failure_ends_also_where_no_error_can_count() -> None:
    import torch

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse:
        manager = ft.Manager(lighthouse_addr=lighthouse.address)
        failing: Any = torch.futures.Future()
        wrapped = manager.wrap_future(failing, 7)
        manager.shutdown()
        failing.set_exception(RuntimeError("late"))
        assert wrapped.done()
        assert wrapped.value() == 7


def test_a_result_is_there_for_each_that_has_waited_for_it() -> None:
    import torch

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        manager.start_quorum()
        rows = torch.ones(2, 3).t()
        work = manager.allreduce(rows)
        copies, begun, go_on = work._after, threading.Event(), threading.Event()

        def slowly() -> None:
            begun.set()
            assert go_on.wait(ftjobs.LIMIT)
            copies()

        work._after = slowly
        first = threading.Thread(target=work.wait)
        first.start()
        assert begun.wait(ftjobs.LIMIT)
        # In the middle of its copy another one comes, and a future.
        futures: list[Any] = []
        others = [threading.Thread(target=work.wait), threading.Thread(target=lambda: futures.append(work.get_future()))]
        for other in others:
            other.start()
        for other in others:
            other.join(0.3)
            assert other.is_alive()
        go_on.set()
        for other in [first, *others]:
            other.join(ftjobs.LIMIT)
            assert not other.is_alive()
        futures[0].wait()
        assert manager.should_commit()


def test_replicas_reach_each_other_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with oxccl.Lighthouse(min_replicas=2) as lighthouse:
        options: dict[str, Any] = {"min_replica_size": 2, "hostname": "::1", "insecure": True}
        replicas = [Replica(name, lighthouse.address, value, 2, **options) for name, value in (("a", 1.0), ("b", 3.0))]
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join(ftjobs.LIMIT)
    assert [r.error for r in replicas] == [None, None]
    # One healed from the other.
    assert replicas[0].x.equal(replicas[1].x)


def test_a_store_has_brackets_round_an_ipv6_address() -> None:
    from oxccl.ft._manager import _bracketed

    assert [_bracketed(host) for host in ("fd00::7", "[fd00::7]", "node-1", "10.0.0.7")] == ["[fd00::7]", "[fd00::7]", "node-1", "10.0.0.7"]


def test_arguments_are_refused_with_a_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxccl import ft

    monkeypatch.delenv("OXCCL_LIGHTHOUSE", raising=False)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="no lighthouse is known"):
        ft.Manager()
    with pytest.raises(ValueError, match="belong together"):
        ft.Manager(load_state_dict=print, lighthouse_addr="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="store to meet in"):
        ft.Manager(rank=0, world_size=2, lighthouse_addr="http://127.0.0.1:1")
    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        with pytest.raises(ValueError, match="allow_heal"):
            manager.start_quorum(allow_heal=False)
        with pytest.raises(RuntimeError, match="call start_quorum first"):
            manager.wait_quorum()
        manager.start_quorum()
        with pytest.raises(ValueError, match="QuantizedGroup"):
            manager.allreduce(__import__("torch").zeros(1), should_quantize=True)
        manager.report_error(RuntimeError("mine"))
        assert "mine" in str(manager.errored())
        assert manager.should_commit() is False
        assert manager.current_step() == 0


def test_a_checkpoint_on_disk_goes_on_at_its_step() -> None:
    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse:
        with ft.Manager(lighthouse_addr=lighthouse.address) as manager:
            for _ in range(3):
                manager.start_quorum()
                assert manager.should_commit()
            saved = manager.state_dict()
        assert saved["step"] == 3
        with ft.Manager(lighthouse_addr=lighthouse.address) as manager:
            manager.load_state_dict(saved)
            assert manager.current_step() == 3
            manager.start_quorum()
            assert manager.should_commit()
            assert manager.current_step() == 4


def test_ctrl_c_ends_a_wait_for_a_quorum(tmp_path: Path) -> None:
    body = """
manager = ft.Manager(lighthouse_addr=lighthouse, min_replica_size=2, quorum_timeout=100, use_async_quorum=False)
tell(ready=1)
try:
    manager.start_quorum()
except KeyboardInterrupt:
    tell(interrupted=1)
manager.shutdown()
tell(left=1)
"""
    with oxccl.Lighthouse(min_replicas=2) as lighthouse, ftjobs.Job(lighthouse.address, body, tmp_path) as job:
        job.start("a")
        job.until("a", "ready", 1)
        # The signal may come before the call: then it ends that.
        time.sleep(0.3)
        at = time.monotonic()
        pid = job.running["a"].pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        assert job.until("a", "interrupted", 1)["at"] - at < 5
        # Its wait does not go on to the deadline.
        assert job.until("a", "left", 1)["at"] - at < 20
        job.ends()


def test_a_script_for_torchft_runs_with_its_import_changed(tmp_path: Path) -> None:
    body = """
from datetime import timedelta
from oxccl.ft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torch import optim
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
group_id = int(name)
sampler = DistributedSampler(data, replica_rank=group_id, num_replica_groups=2, group_rank=0, num_replicas=1, shuffle=True)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
def load_state_dict(state_dict):
    m.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optim"])
def state_dict():
    return {"model": m.state_dict(), "optim": optimizer.state_dict()}
pg = ProcessGroupGloo(timeout=timedelta(seconds=30))
manager = Manager(pg=pg, min_replica_size=2, load_state_dict=load_state_dict, state_dict=state_dict,
                  replica_id=f"train_ddp_{group_id}", timeout=timedelta(seconds=30))
m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
m = DistributedDataParallel(manager, m)
optimizer = Optimizer(manager, optim.AdamW(m.parameters()))
epoch = 0
while manager.current_step() < 10:
    sampler.set_epoch(epoch)
    epoch += 1
    for (x,) in loader:
        optimizer.zero_grad()
        out = m(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        if manager.current_step() >= 10:
            break
tell(done=manager.current_step(), participants=manager.num_participants(), batches=manager.batches_committed(), bits=bits(m.parameters()))
manager.shutdown(wait=False)
"""
    with oxccl.Lighthouse(min_replicas=2) as lighthouse, ftjobs.Job(lighthouse.address, body, tmp_path) as job:
        for name in ("0", "1"):
            job.start(name, TORCHFT_LIGHTHOUSE=lighthouse.address, RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1")
        ended = job.ends()
    assert [(e["done"], e["participants"], e["batches"]) for e in ended.values()] == [(10, 2, 19)] * 2
    assert ended["0"]["bits"] == ended["1"]["bits"]


def test_ranks_of_a_replica_reduce_with_their_like_and_vote_together(tmp_path: Path) -> None:
    body = """
rank, port = int(sys.argv[3]), int(sys.argv[4])
place = "ab".index(name[0])
x = torch.full((2,), float(rank))
with ft.Manager(None, x.copy_, lambda: x, min_replica_size=2, rank=rank, world_size=2, store_addr="127.0.0.1", store_port=port, init_sync=False,
                replica_id=name[0], lighthouse_addr=lighthouse if rank == 0 else None, timeout=30) as manager:
    committed = []
    while manager.current_step() < 4:
        manager.start_quorum()
        mean = torch.full((2,), 10.0 * rank + place)
        if name == "a1" and len(committed) == 2:
            manager.wait_quorum()
            manager.report_error(RuntimeError("mine"))
        manager.allreduce(mean).wait()
        committed.append(manager.should_commit())
        if committed[-1]:
            x += mean
    tell(done=1, x=x.tolist(), committed=committed)
"""
    stores = {"a": oxccl.StoreServer(), "b": oxccl.StoreServer()}
    with oxccl.Lighthouse(min_replicas=2) as lighthouse, ftjobs.Job(lighthouse.address, body, tmp_path) as job:
        for name, store in stores.items():
            for rank in range(2):
                job.start(f"{name}{rank}", rank, store.address.split(":")[1])
        ended = job.ends()
    # Each rank reduces with its like in the other replica, whose values are not mixed with those of the other rank.
    low, high = ended["a0"]["x"][0], ended["a1"]["x"][0]
    assert (low, high) == (ended["b0"]["x"][0], ended["b1"]["x"][0])
    # In the first two steps both replicas count; after the error one may have healed into a step, which only the other one's values count in.
    assert 2.0 <= low <= 4.0 and high - low == 1 + 4 * 10
    assert ended["a0"]["committed"][:2] == [True, True] and False in ended["a0"]["committed"]
    # A replica's ranks decide alike.
    for name in "ab":
        assert ended[f"{name}0"]["committed"] == ended[f"{name}1"]["committed"]
