"""Two replicas train with Streaming DiLoCo and exchange int8: each part of the model once in 8 steps, in a quarter of the bytes.

``python ft_diloco.py`` starts a lighthouse and the replicas. Each trains on samples of its own; the parameters of both are one model.
"""

import subprocess
import sys

import torch
from torch import nn

import oxccl
from oxccl import ft

ROUNDS = 40


def train(lighthouse: str, replica_id: str) -> None:
    """One replica."""
    torch.set_num_threads(1)
    torch.manual_seed(ord(replica_id))
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    # What rounding takes from an outer gradient is added to the next one.
    group = oxccl.QuantizedGroup("int8", error_feedback=True)
    manager = ft.Manager(
        group, inner.load_state_dict, inner.state_dict, min_replica_size=2, use_async_quorum=False, lighthouse_addr=lighthouse, replica_id=replica_id
    )
    fragments = [model[0], model[2]]
    diloco = ft.DiLoCo(manager, fragments, inner, outer, sync_every=8, fragment_sync_delay=1, fragment_update_alpha=0.5)
    with diloco:
        # Step 0 was the first synchronisation.
        while manager.current_step() <= ROUNDS:
            x = torch.randn(32, 16)
            inner.zero_grad()
            loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
            loss.backward()
            inner.step()
            for done in diloco.reports:
                print(f"{replica_id}: round {done.step} of {done.contributors} replicas, loss {loss.item():.4f}", flush=True)
    diloco.finish()
    print(f"{replica_id}: done: parameters {diloco.global_hash()[:16]}, sent {group.traffic().sent} bytes", flush=True)


def main() -> None:
    """Starts two."""
    with oxccl.Lighthouse(min_replicas=2) as lighthouse:
        command = [sys.executable, __file__, lighthouse.address]
        replicas = [subprocess.Popen([*command, name]) for name in "ab"]
        sys.exit(max(replica.wait() for replica in replicas))


train(*sys.argv[1:]) if len(sys.argv) == 3 else main()
