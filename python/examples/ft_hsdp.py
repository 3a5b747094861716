"""Two replicas of two processes each: FSDP2 shards the model inside a replica, gradients are averaged across; one replica is killed and comes back.

``python ft_hsdp.py`` starts a lighthouse and the processes. On several machines the lighthouse is ``oxccl lighthouse``, and ``oxccl launch``
or torchrun starts the processes of a replica.
"""

import hashlib
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import oxccl
from oxccl import ft

STEPS, RANKS = 150, 2


def train(lighthouse: str, replica_id: str, rank: int, meeting: str) -> None:
    """One rank of one replica. `meeting` is a file by which the ranks of this incarnation of the replica find each other."""
    torch.set_num_threads(1)
    dist.init_process_group("oxccl", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    manager = ft.Manager(
        load_state_dict=lambda found: (model.load_state_dict(found["model"]), optimizer.load_state_dict(found["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        rank=rank, world_size=RANKS, store=oxccl.FileStore(f"{meeting}.manager"), lighthouse_addr=lighthouse, replica_id=replica_id,
    )  # fmt: skip
    mesh = ft.ft_init_device_mesh("cpu", (2, RANKS), ("replicate", "shard"), replicate_dim=0, manager=manager)
    for layer in [*(part for part in model if isinstance(part, nn.Linear)), model]:
        ft.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stepper = ft.Optimizer(manager, optimizer)
    # All see the same number of participants in a step, so all end with the same one.
    while manager.current_step() < STEPS or manager.num_participants() < 2:
        x = torch.randn(32, 16)
        stepper.zero_grad()
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        stepper.step()
        if rank == 0:
            print(f"step {manager.current_step()} participants {manager.num_participants()} loss {loss.item():.4f}", flush=True)
    whole = [p.full_tensor().detach().numpy().tobytes() for p in model.parameters()]
    print(f"done: parameters {hashlib.sha256(b''.join(whole)).hexdigest()[:16]}", flush=True)
    manager.shutdown()
    dist.destroy_process_group()


def main() -> None:
    """Starts two replicas, kills one after 20 steps and starts it again."""
    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse, tempfile.TemporaryDirectory() as folder:

        def start(replica: str, incarnation: int) -> list[subprocess.Popen[str]]:
            command = [sys.executable, __file__, lighthouse.address, replica]
            meeting = os.path.join(folder, f"{replica}{incarnation}")
            return [subprocess.Popen([*command, str(rank), meeting], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]

        a, b = start("a", 1), start("b", 1)
        for line in a[0].stdout or []:
            print("a:", line, end="")
            if line.startswith("step 20 "):
                for process in b:
                    process.kill()
                b = start("b", 2)
        for name, process in [("a", a[1]), ("b", b[0]), ("b", b[1])]:
            print(f"{name}:", process.communicate()[0].splitlines()[-1])


train(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]) if len(sys.argv) == 5 else main()
