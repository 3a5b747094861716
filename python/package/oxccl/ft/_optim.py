"""An optimizer whose steps are steps of the job."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer as TorchOptimizer

from oxccl.ft._manager import Manager


class Optimizer(TorchOptimizer):
    """Wraps an optimizer: `zero_grad` begins a step of the job, and `step` applies the gradients if it commits.

    Args:
        manager: the replica.
        optim: the optimizer, made for the parameters as usual.

    """

    def __init__(self, manager: Manager, optim: TorchOptimizer) -> None:
        self.optim = optim
        self.manager = manager

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Asks for the quorum of the next step, and clears the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """Decides whether the step counts, and applies the gradients if so.

        A step that is lost because of another replica is done again with the same gradients; if they were changed since, it is left out.
        """
        if closure is not None:
            raise ValueError("a step with a closure cannot be repeated: compute the gradients first, then call step()")
        while not self.manager.should_commit():
            if not self.manager._repeat():
                return
        self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As of the wrapped optimizer."""
        found: dict[str, Any] = self.optim.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of the wrapped optimizer."""
        found: list[dict[str, Any]] = self.optim.param_groups
        return found

    @property
    def state(self) -> Any:
        """As of the wrapped optimizer."""
        return self.optim.state

    def __getattr__(self, name: str) -> Any:
        """Whatever else a scheduler asks of an optimizer."""
        if name in ("optim", "manager"):
            raise AttributeError(name)
        return getattr(self.optim, name)
