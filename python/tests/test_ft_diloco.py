"""LocalSGD and DiLoCo over replicas that die and come back."""

from __future__ import annotations

import array
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ftjobs
import oxccl
from ftjobs import Job

NET = """
import oxccl
place = "abc".index(name[0])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
def batch(step, place):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + place))
    return x, x.sum(1, keepdim=True)
def inner_step(net, optimizer, step, place):
    x, y = batch(step, place)
    optimizer.zero_grad()
    (net(x) - y).square().mean().backward()
    optimizer.step()
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
"""

TRAIN = (
    NET
    + """
options = json.loads(sys.argv[3])
pause, stop = float(sys.argv[4]), sys.argv[5]
fragments = [net[0], net[2]] if options.pop("fragments", 1) == 2 else [net]
group = oxccl.QuantizedGroup(options.pop("format"), error_feedback=True) if "format" in options else None
last = options.pop("last", 10**6)
step = 0
def save():
    return {"inner": inner.state_dict(), "step": step}
def load(state):
    global step
    inner.load_state_dict(state["inner"])
    step = state["step"]
manager = ft.Manager(group, load, save, min_replica_size=options.pop("least", 1), use_async_quorum=False,
                     init_sync=options.pop("init_sync", True),
                     timeout=30, quorum_timeout=60, replica_id=name, lighthouse_addr=lighthouse)
local, folder = options.pop("local", False), options.pop("folder", None)
if local:
    rounds = ft.LocalSGD(manager, net, inner, 4)
else:
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    rounds = ft.DiLoCo(manager, fragments, inner, outer, options.pop("sync_every", 4), **options)
checkpoints = ft.Checkpoints(folder, place, 2) if folder else None
went_on = rounds.restore(checkpoints) if checkpoints else None
with rounds:
    tell(step=manager.current_step(), healed=[r.healed for r in rounds.reports], hash=rounds.global_hash())
    while manager.current_step() <= last:
        time.sleep(pause)
        if os.path.exists(stop):
            last = int(open(stop).read())
        inner_step(net, inner, step, place)
        step += 1
        if rounds.reports and checkpoints:
            # Else the next one is left out.
            checkpoints.flush()
            assert rounds.save(checkpoints)
            tell(saved=manager.current_step())
        for r in rounds.reports:
            tell(step=manager.current_step(), contributors=r.contributors, healed=r.healed, hash=rounds.global_hash())
    traffic, batches = manager._replica.traffic().sent, manager.batches_committed()
rounds.finish()
tell(done=1, hash=rounds.global_hash(), bits=bits(net.parameters()), sent=traffic, went_on=went_on, batches=batches)
"""
)

ALONE = (
    NET
    + """
import copy
how = sys.argv[3]
nets = [net, copy.deepcopy(net)]
inners = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in nets]
shared = copy.deepcopy(net)
outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
for step in range(20):
    for place in range(2):
        inner_step(nets[place], inners[place], step, place)
    if step % 4 == 3:
        with torch.no_grad():
            for p, a, b in zip(shared.parameters(), *(n.parameters() for n in nets)):
                p.grad = ((p - a) + (p - b)) / 2
            if how == "local":
                for p in shared.parameters():
                    p -= p.grad
            else:
                outer.step()
            for n in nets:
                n.load_state_dict(shared.state_dict())
tell(done=1, bits=bits(net.parameters()))
"""
)


@pytest.mark.parametrize("how", ["local", "diloco"])
def test_rounds_are_those_of_one_process_with_torchs_outer_optimizer(how: str, tmp_path: Path) -> None:
    import torch

    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, f'{{"local": {"true" if how == "local" else "false"}, "last": 5}}', 0, "none")
        job.start_also("alone", ALONE, how)
        ended = job.ends()
        contributors = [line["contributors"] for line in job.said("a") if "contributors" in line]
    assert contributors == [2] * 5
    assert ended["a"]["bits"] == ended["b"]["bits"]
    ours, theirs = (torch.tensor(ended[name]["bits"], dtype=torch.int32).view(torch.float32) for name in ("a", "alone"))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), (ours - theirs).abs().max()


OPTIONS = {
    "streaming": '{"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5, "least": 2}',
    "eager, int8 with error feedback": '{"eager": true, "format": "int8", "least": 2}',
}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_replica_that_is_killed_heals_and_all_end_equal(how: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    arguments: tuple[Any, ...] = (OPTIONS[how], 0.01, stop)
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=3) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b", "c"):
            job.start(name, *arguments)
        job.until("a", "step", 6)
        job.kill("c")
        job.until("a", "step", job.said("a")[-1]["step"] + 4)
        job.start("c", *arguments)
        job.until("c", "step", 5)
        # A round that all have yet to begin: they go in lockstep.
        (tmp_path / "new").write_text(str(job.said("a")[-1]["step"] + 10))
        (tmp_path / "new").rename(stop)
        ended = job.ends()
        said, second = job.said("a"), job.said("c")
    # It joined where the others were, with their state.
    assert second[0]["step"] > 1
    assert any(line.get("healed") is True for line in second), second
    assert {line["contributors"] for line in said if "contributors" in line} >= {2, 3}
    steps = [line["step"] for line in said if "contributors" in line]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert ended["a"]["hash"] == ended["b"]["hash"] == ended["c"]["hash"]


def test_a_job_that_was_killed_goes_on_from_its_checkpoints_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    how = '{"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5, "least": 2, "format": "int8", "last": 10, "init_sync": false'
    undisturbed, killed = f"{how}}}", f'{how}, "folder": "{tmp_path}/disk"}}'
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, undisturbed, 0, "none")
        expected = job.ends()
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, killed, 0.02, "none")
        job.until("b", "saved", 5)
        for name in ("a", "b"):
            job.kill(name)
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name, killed, 0, "none")
        ended = job.ends()
    assert 3 <= ended["a"]["went_on"] == ended["b"]["went_on"] < 10
    for name in ("a", "b"):
        assert {key: ended[name][key] for key in ("hash", "bits", "batches")} == {key: expected[name][key] for key in ("hash", "bits", "batches")}


def opened(file: Path) -> dict[str, list[float]]:
    """The f32 tensors of a safetensors file, read by the format's description: a length, a header in JSON, the data."""
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert all(type(value) is str for value in header.pop("__metadata__").values())
    found = {}
    for name, about in header.items():
        first, last = (begin + offset for offset in about["data_offsets"])
        if about["dtype"] == "F32":
            values = array.array("f", raw[first:last])
            assert len(values) == math.prod(about["shape"])
            found[name] = values.tolist()
    return found


def test_a_checkpoint_is_a_safetensors_file_with_the_models_tensors(tmp_path: Path) -> None:
    import torch

    from oxccl import ft

    net = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with oxccl.Lighthouse() as lighthouse:
        manager = ft.Manager(load_state_dict=inner.load_state_dict, state_dict=inner.state_dict, lighthouse_addr=lighthouse.address)
        checkpoints = ft.Checkpoints(tmp_path, 0, 1)
        with (rounds := ft.LocalSGD(manager, net, inner, 1)):
            inner.step()
            assert rounds.save(checkpoints)
            checkpoints.flush()
        manager.shutdown()
    tensors = opened(next((tmp_path / "replica-0").glob("*.safetensors")))
    for parameter in net.parameters():
        assert parameter.flatten().tolist() in tensors.values(), tensors


HELD = """
import os, signal, sys
from oxccl import ft

checkpoints = ft.Checkpoints(sys.argv[1], 0, 1)
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainers_children_do_not_keep_its_checkpoints(tmp_path: Path) -> None:
    from oxccl import ft

    with subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE) as trainer:
        assert trainer.wait(ftjobs.LIMIT) == -signal.SIGKILL
        # Its child waits for what comes over this pipe.
        ft.Checkpoints(tmp_path, 0, 1, timeout=2)


def test_checkpoints_that_are_damaged_or_of_another_model_are_refused(tmp_path: Path) -> None:
    import torch

    from oxccl import ft

    def run(lighthouse: str, width: int = 2) -> tuple[Any, Any, Any]:
        net = torch.nn.Linear(width, 2)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        manager = ft.Manager(load_state_dict=inner.load_state_dict, state_dict=inner.state_dict, lighthouse_addr=lighthouse)
        return manager, ft.LocalSGD(manager, net, inner, 1), inner

    with pytest.raises(oxccl.InvalidArgument, match="replica 2 of 2"):
        ft.Checkpoints(tmp_path, 2, 2)
    with oxccl.Lighthouse() as lighthouse:
        checkpoints = ft.Checkpoints(tmp_path, 0, 1)
        with pytest.raises(oxccl.Error, match="being written by another process"):
            ft.Checkpoints(tmp_path, 0, 1, timeout=0)
        manager, rounds, inner = run(lighthouse.address)
        assert rounds.restore(checkpoints) is None
        with pytest.raises(oxccl.Error) as early:
            rounds.save(checkpoints)
        assert early.value.kind == "InvalidState"
        with rounds:
            for _ in range(2):
                inner.step()
                assert rounds.save(checkpoints)
                checkpoints.flush()
        assert (checkpoints.step, checkpoints.error) == (3, None)
        manager.shutdown()
        assert [int(file.stem.split("-")[1]) for file in sorted((tmp_path / "replica-0").glob("step-*"))] == [2, 3]
        manager, rounds, _ = run(lighthouse.address, 3)
        with pytest.raises(oxccl.Error):
            rounds.restore(checkpoints)
        manager.shutdown()
        newest = tmp_path / "replica-0" / "step-000000000003.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1])
        manager, rounds, _ = run(lighthouse.address)
        with pytest.warns(UserWarning, match="left out.*step-000000000003"):
            assert rounds.restore(checkpoints) == 2
        assert manager.current_step() == 2
        manager.shutdown()
        (tmp_path / "replica-0" / "step-000000000002.safetensors").write_bytes(b"")
        manager, rounds, _ = run(lighthouse.address)
        with pytest.raises(oxccl.Error, match="is whole") as refused:
            rounds.restore(checkpoints)
        assert refused.value.kind == "Corrupt"
        manager.shutdown()


def test_what_the_outer_steps_do_not_do_is_refused() -> None:
    import torch

    from oxccl import ft

    net = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:

        def make(outer: Any, model: Any = net, **options: Any) -> Any:
            return ft.DiLoCo(manager, [model], inner, outer, options.pop("sync_every", 4), **options)

        for outer, told in [
            (torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9), "nesterov"),
            (torch.optim.SGD(net.parameters(), lr=0.7, weight_decay=0.1), "weight_decay"),
            (torch.optim.AdamW(net.parameters()), "weight_decay|betas"),
            (torch.optim.Adagrad(net.parameters()), "Adagrad"),
        ]:
            with pytest.raises(oxccl.Unsupported, match=told):
                make(outer)
        good = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with pytest.raises(oxccl.Unsupported, match=r"0\.weight.*float64"):
            make(good, torch.nn.Linear(2, 2).double())
        with pytest.raises(oxccl.InvalidArgument, match="delay 4"):
            make(good, fragment_sync_delay=4)
        with pytest.raises(ValueError, match="2 outer optimizers for 1 fragments"):
            make([good, good])
        make(torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99), weight_decay=0.0))
        make([good])
