"""Data parallel over replicas that die and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import oxccl
from ftjobs import Job

TRAIN = """
steps, use_async, pause, stop = int(sys.argv[3]), sys.argv[4] == "True", float(sys.argv[5]), sys.argv[6]
dies_at = int(sys.argv[7]) if len(sys.argv) > 7 else None
place, together = "abc".index(name), stop == "none"
torch.manual_seed(0 if together else place)
net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

def save():
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

def load(state):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])

with ft.Manager(None, load, save, min_replica_size=1, init_sync=not together, use_async_quorum=use_async, timeout=30, quorum_timeout=60,
                replica_id=name, lighthouse_addr=lighthouse) as manager:
    model = ft.DistributedDataParallel(manager, net, bucket_cap_mb=0.01)
    stepper = ft.Optimizer(manager, optimizer)
    schedule = torch.optim.lr_scheduler.ConstantLR(stepper, factor=1.0)
    healed = 0
    while manager.current_step() < steps:
        time.sleep(pause)
        if os.path.exists(stop):
            steps = int(open(stop).read())
        step = manager.current_step()
        draw = torch.Generator().manual_seed(10 * step + place)
        stepper.zero_grad()
        x = torch.randn(8, 8, generator=draw)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if step == dies_at:
            # In the middle of a step: the others wait for its gradients.
            manager.wait_quorum()
            os.kill(os.getpid(), 9)
        loss.backward()
        if together:
            # On the averages.
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepper.step()
        part = manager._participation()
        tell(step=manager.current_step(), members=part.replica_world_size, healed=part.healed_bytes or 0, loss=loss.item(), epoch=part.epoch)
    tell(done=manager.current_step(), bits=bits(net.parameters()), moments=[s["exp_avg"].sum().item() for s in optimizer.state.values()])
"""

ALONE = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(int(sys.argv[3])):
    optimizer.zero_grad()
    for place in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + place))
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
    for p in net.parameters():
        p.grad /= 2
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
tell(done=1, bits=bits(net.parameters()))
"""


@pytest.mark.parametrize("use_async", [True, False])
def test_two_replicas_train_as_one_process_does(use_async: bool, tmp_path: Path) -> None:
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, 12, use_async, 0, "none")
        job.start_also("alone", ALONE, 12)
        ended = job.ends()
    assert ended["a"]["bits"] == ended["b"]["bits"]
    assert ended["a"]["moments"] == ended["b"]["moments"]
    # A sum of two is the same in whatever order, and halving is exact.
    assert ended["a"]["bits"] == ended["alone"]["bits"]


@pytest.mark.parametrize("use_async", [True, False])
def test_a_replica_that_is_killed_heals_and_all_end_equal(use_async: bool, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=3) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, 10**6, use_async, 0.02, stop)
        job.start("c", 10**6, use_async, 0.02, stop, 10)
        job.dies("c")
        job.until("a", "step", job.said("a")[-1]["step"] + 5)
        job.start("c", 10**6, use_async, 0.02, stop)
        job.until("c", "step", 20)
        second = job.said("c")
        # A step that all have yet to begin: they go in lockstep.
        last = job.said("a")[-1]["step"] + 50
        (tmp_path / "new").write_text(str(last))
        (tmp_path / "new").rename(stop)
        ended = job.ends()
        said = job.said("a")
    assert second[0]["healed"] > 0
    assert {line["members"] for line in said if "members" in line} >= {2, 3}
    # Each batch of a survivor counted: that of the step which the death broke was sent again.
    assert [line["step"] for line in said if "step" in line] == list(range(1, last + 1))
    assert ended["a"]["bits"] == ended["b"]["bits"] == ended["c"]["bits"]
    assert ended["a"]["moments"] == ended["b"]["moments"] == ended["c"]["moments"]


def test_sparse_gradients_and_residuals_are_refused() -> None:
    import torch

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse:
        with ft.Manager(lighthouse_addr=lighthouse.address) as manager:
            model = ft.DistributedDataParallel(manager, torch.nn.Embedding(4, 2, sparse=True))
            manager.start_quorum()
            with pytest.raises(oxccl.Unsupported, match="sparse"):
                model(torch.tensor([1])).sum().backward()
        group = oxccl.QuantizedGroup("int8", error_feedback=True)
        with (
            ft.Manager(group, lighthouse_addr=lighthouse.address) as manager,
            pytest.raises(oxccl.Unsupported, match="residuals"),
        ):
            ft.DistributedDataParallel(manager, torch.nn.Linear(1, 1))


def test_gradients_that_add_up_and_parameters_that_are_not_used() -> None:
    import torch

    from oxccl import ft

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "other": torch.nn.Linear(4, 1)})
    x = torch.randn(6, 4)

    def forward(x: Any, name: str) -> Any:
        return net[name](x).sum()

    net.forward = forward
    expected = {}
    for name in ("used", "other"):
        net[name](x).sum().backward()
        expected[name] = net[name].weight.grad.clone()
        net.zero_grad()
    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        model = ft.DistributedDataParallel(manager, net)
        optimizer = ft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.zero_grad()
        with model.no_sync():
            model(x, "other").backward()
        model(x, "used").backward()
        # Alone, an average is the gradient itself; that of the pass without exchange is part of it.
        assert net["used"].weight.grad.equal(expected["used"])
        assert net["other"].weight.grad.equal(expected["other"])
        optimizer.step()
        assert manager.current_step() == 1
        optimizer.zero_grad()
        model(x, "used").backward()
        assert net["other"].weight.grad.equal(torch.zeros(1, 4))
        optimizer.step()
        assert manager.current_step() == 2


def test_a_sampler_deals_all_samples_to_all_ranks() -> None:
    from oxccl import ft

    data = list(range(24))
    dealt = [
        list(ft.DistributedSampler(data, replica_rank=replica, num_replica_groups=3, group_rank=rank, num_replicas=2, shuffle=False))
        for replica in range(3)
        for rank in range(2)
    ]
    assert sorted(sample for part in dealt for sample in part) == data
    assert dealt[3] == [3, 9, 15, 21]
    assert list(ft.DistributedSampler(data, replica_rank=1, num_replica_groups=2, shuffle=False)) == data[1::2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_gradient_that_comes_in_parts_within_one_pass_is_refused(use_reentrant: bool) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    from oxccl import ft

    class Twice(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=use_reentrant)
            return self.head(x)

    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        net = Twice()
        model = ft.DistributedDataParallel(manager, net)
        manager.start_quorum()
        loss = model(torch.ones(1, 2, requires_grad=True)).sum()
        if use_reentrant:
            with pytest.raises(oxccl.Unsupported, match="use_reentrant=False"):
                loss.backward()
        else:
            loss.backward()
            assert manager.should_commit()
            alone = Twice()
            alone.load_state_dict(net.state_dict())
            alone(torch.ones(1, 2, requires_grad=True)).sum().backward()
            assert torch.equal(net.block.weight.grad, alone.block.weight.grad)


def test_a_lost_step_is_done_again_with_the_gradients_of_its_own_model() -> None:
    import torch

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        steppers = []
        for _ in range(2):
            model = ft.DistributedDataParallel(manager, torch.nn.Linear(4, 1))
            steppers.append((model, ft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))))
        # The model that was wrapped first, too: its gradients stand, and the other's play no part.
        for step, (model, optimizer) in enumerate(steppers, 1):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            manager.report_error(RuntimeError("of another replica"))
            optimizer.step()
            assert manager.current_step() == step


def test_a_lost_step_of_two_passes_is_left_out_and_not_done_again_with_one_of_them() -> None:
    import torch

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        model = ft.DistributedDataParallel(manager, torch.nn.Linear(4, 1))
        optimizer = ft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        for passes, counts in ((2, 0), (1, 1)):
            optimizer.zero_grad()
            for _ in range(passes):
                model(torch.ones(1, 4)).sum().backward()
            manager.report_error(RuntimeError("of another replica"))
            optimizer.step()
            assert manager.current_step() == counts
