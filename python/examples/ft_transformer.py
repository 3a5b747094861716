"""Three replicas train a small transformer on text; one is killed and comes back, and all end with the same parameters.

``python ft_transformer.py [TEXT]`` starts a lighthouse and the replicas. On several machines the lighthouse is ``oxccl lighthouse``, and each replica
is started by its machine's supervisor.
"""

import hashlib
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import oxccl
from oxccl import ft

STEPS, CONTEXT, WIDTH, BATCH = 100, 32, 64, 8


class Transformer(nn.Module):
    """Says the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the byte after each."""
        return self.head(self.layers(self.embed(x) + self.places, mask=self.mask, is_causal=True))


def train(lighthouse: str, replica_id: str, text: str) -> None:
    """One replica. But for the manager's line and two names this is a script for one process."""
    torch.set_num_threads(1)
    data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer}
    manager = ft.Manager(
        load_state_dict=lambda found: [state[key].load_state_dict(found[key]) for key in state],
        state_dict=lambda: {key: part.state_dict() for key, part in state.items()},
        min_replica_size=2, lighthouse_addr=lighthouse, replica_id=replica_id,
    )  # fmt: skip
    ddp, stepper = ft.DistributedDataParallel(manager, model), ft.Optimizer(manager, optimizer)
    # All see the same number of participants in a step, so all end with the same one.
    while manager.current_step() < STEPS or manager.num_participants() < 3:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        x, y = data[starts[:, :-1]], data[starts[:, 1:]]
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        stepper.step()
        print(f"step {manager.current_step()} participants {manager.num_participants()} loss {loss.item():.3f}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"done: parameters {digest[:16]}", flush=True)
    manager.shutdown()


def main(text: str) -> None:
    """Starts three, kills one after 20 steps and starts it again."""
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=3) as lighthouse:
        command = [sys.executable, __file__, lighthouse.address]
        replicas = {name: subprocess.Popen([*command, name, text], stdout=subprocess.PIPE, text=True) for name in "abc"}
        for line in replicas["a"].stdout or []:
            print("a:", line, end="")
            if line.startswith("step 20 "):
                replicas["c"].kill()
                replicas["c"] = subprocess.Popen([*command, "c", text], stdout=subprocess.PIPE, text=True)
        for name in "bc":
            print(f"{name}:", replicas[name].communicate()[0].splitlines()[-1])


train(*sys.argv[1:]) if len(sys.argv) == 4 else main(sys.argv[1] if len(sys.argv) == 2 else pydoc_data.topics.__file__)
