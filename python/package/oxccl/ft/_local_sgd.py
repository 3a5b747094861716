"""Training in which replicas exchange parameters rarely: LocalSGD, DiLoCo and Streaming DiLoCo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

import oxccl
from oxccl import _oxccl
from oxccl.ft._manager import Manager


class Checkpoints:
    """A replica's checkpoints in a folder on disk, for `DiLoCo.save` and `DiLoCo.restore`.

    ``FOLDER/replica-R/step-S.safetensors`` is the state in which step S begins. A file is there whole or not at all, and sealed with a hash. One
    process has a replica's folder open at a time; the folder may be shared by all replicas or be each machine's own.

    Args:
        folder: where the folders of the replicas are.
        replica: the number of this one, the same in each of its incarnations.
        replicas: how many there may be; each goes on from a step that all those have which have checkpoints here.
        keep: the newest ones that stay.
        timeout: seconds to wait for a process that still has the folder open, as one that is dying.

    """

    def __init__(self, folder: str | os.PathLike[str], replica: int, replicas: int, keep: int = 3, timeout: float = 10.0) -> None:
        self._folder = _oxccl._Checkpoints(folder, replica, replicas, keep, timeout)

    def flush(self, timeout: float = 60.0) -> None:
        """Waits until nothing is being written, as before the process ends. Raises what the last write failed of, such as a full disk."""
        self._folder.flush(timeout)

    @property
    def step(self) -> int | None:
        """The step of the newest checkpoint that this process has written."""
        return self._folder.step

    @property
    def error(self) -> oxccl.Error | None:
        """What the last write failed of; the checkpoints before it are as they were."""
        return self._folder.error


class _Rounds:
    """Rounds of exchange after inner steps. The parameters are read and written where they are."""

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[nn.Module],
        optimizer: Any,
        sync_every: int,
        outer: tuple[str, float, float],
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        names: list[str] = []
        tensors: list[Any] = []
        parts: list[list[int]] = []
        for number, fragment in enumerate(fragments):
            part = []
            for name, p in fragment.named_parameters():
                where = f"{number}.{name}"
                if p.dtype != torch.float32 or p.device.type != "cpu" or not p.is_contiguous():
                    raise oxccl.Unsupported(f"parameter '{where}' is {p.dtype} on {p.device}; contiguous float32 parameters in host memory take part")
                part.append(len(names))
                names.append(where)
                tensors.append(p.detach())
            parts.append(part)
        group = manager._pg
        feedback = group if isinstance(group, oxccl.QuantizedGroup) and group.has_error_feedback else None
        if bucket_cap_mb is not None:
            options["bucket_elements"] = max(1, int(bucket_cap_mb * 2**18))
        self._manager = manager
        self._optimizer = optimizer
        self._hook: Any = None
        self._has_begun = False
        self._run = _oxccl._Diloco(manager._replica, names, tensors, parts, sync_every=sync_every, outer=outer, feedback=feedback, **options)
        self.reports: list[_oxccl.Round] = []
        """The rounds that committed with the last inner step, or at the start: usually none."""

    def __enter__(self) -> Any:
        """Joins the job: takes the state of a running one, or meets the others at the start. Then each step of the optimizer is an inner step."""
        if not self._has_begun:
            self.reports = self._run.begin(self._manager._states)
            self._has_begun = True
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        """The optimizer's steps are its own again."""
        self._hook.remove()

    def _after_step(self, *_: Any) -> None:
        self.reports = self._run.after_inner_step(self._manager._states)

    def finish(self) -> None:
        """Ends the run: a closing round without data, in which a replica that is behind still heals, so that all end equal; then leaves.

        All replicas call it after the same round. Without it, inner steps since the last round stay with this replica.
        """
        self._run.finish(self._manager._states)
        self._manager.shutdown()

    def save(self, checkpoints: Checkpoints) -> bool:
        """Hands all that this replica goes on from to `checkpoints`, which write it beside the training. Between two inner steps, once it has begun.

        That is the parameters, what outer steps and error feedback remember, and the manager's state functions. False if the checkpoint before is
        still being written: this one is left out then.
        """
        return self._run.save(self._manager._states, checkpoints._folder)

    def restore(self, checkpoints: Checkpoints) -> int | None:
        """Goes on from the newest checkpoint that all replicas have, whole; its step, or None if there is none. Before the context begins.

        If all replicas do so, the run ends as one that was never stopped; a replica that is behind the others heals. If this replica has
        checkpoints of which none is whole, it raises.
        """
        step, damaged = self._run.restore(self._manager._states, checkpoints._folder)
        for text in damaged:
            warnings.warn(f"a checkpoint is left out: {text}", stacklevel=2)
        return step

    def global_hash(self) -> str:
        """A hash over the parameters as of the last round, equal on all replicas of the same round."""
        return self._run.global_hash()


class LocalSGD(_Rounds):
    """Averages the parameters over the replicas every so many steps of the optimizer.

    Use it as a context around the training loop. A round that fails is done again among the replicas that are left; what they trained is not lost.

    Args:
        manager: the replica; its state is the optimizer's and what else the loop needs. The parameters travel by themselves.
        model: the model.
        optimizer: its optimizer.
        sync_every: inner steps between two rounds.

    """

    def __init__(self, manager: Manager, model: nn.Module, optimizer: Any, sync_every: int) -> None:
        super().__init__(manager, [model], optimizer, sync_every, ("sgd", 1.0, 0.0))


class DiLoCo(_Rounds):
    """DiLoCo, Streaming DiLoCo with several fragments, and eager updates.

    Use it as a context around the training loop. With a `Manager` over ``QuantizedGroup("int4", error_feedback=True)`` outer gradients travel in
    fewer bytes, and what rounding takes is added the next time.

    Args:
        manager: the replica; its state is the inner optimizer's and what else the loop needs. The parameters, and what the outer steps remember,
            travel by themselves.
        model_fragments: the parts of the model, each synchronised in a round of its own.
        inner_optimizer: the optimizer of the training loop.
        outer_optimizer: one of torch: `SGD` with Nesterov momentum or without any, or `AdamW` with betas (0.9, 0.99) and no decay. Its kind and
            rates are taken; a list holds one for each fragment, all alike.
        sync_every: inner steps in which each fragment is synchronised once.
        backup_device: of the copies; None or the CPU.
        pin_memory: taken and not used: the copies are in host memory.
        use_bucketization: taken and not used: it is always so.
        bucket_cap_mb: the size of a piece in which a fragment travels; by default 1 MiB.
        should_quantize: needs a quantised group under the manager, which quantises whatever this says.
        fragment_sync_delay: inner steps between sending a fragment and applying the result.
        fragment_update_alpha: the share of the local values that is kept then.
        eager: the exchange of a round overlaps with the steps of the next one.
        round_timeout: seconds that one round may wait for others, repetitions included.

    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: Any,
        outer_optimizer: Any,
        sync_every: int,
        backup_device: Any = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: float | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        eager: bool = False,
        round_timeout: float = 600.0,
    ) -> None:
        if backup_device is not None and torch.device(backup_device).type != "cpu":
            raise oxccl.Unsupported(f"backup_device is {backup_device}; the copies are in host memory")
        if should_quantize and not isinstance(manager._pg, oxccl.QuantizedGroup):
            raise ValueError("should_quantize=True: the group decides how values travel; give the manager pg=oxccl.QuantizedGroup('int8')")
        given = outer_optimizer if isinstance(outer_optimizer, list) else [outer_optimizer]
        if isinstance(outer_optimizer, list) and len(given) != len(model_fragments):
            raise ValueError(f"{len(given)} outer optimizers for {len(model_fragments)} fragments; give one, or one for each")
        outers = {_outer(one) for one in given}
        if len(outers) != 1:
            raise oxccl.Unsupported(f"the outer optimizers differ: {sorted(outers)}; all fragments have the same kind and rates")
        super().__init__(
            manager,
            model_fragments,
            inner_optimizer,
            sync_every,
            outers.pop(),
            bucket_cap_mb,
            delay=fragment_sync_delay,
            mixing=fragment_update_alpha,
            eager=eager,
            round_timeout=round_timeout,
        )


def _outer(optimizer: Any) -> tuple[str, float, float]:
    """Kind, rate and momentum of one of torch's optimizers; what the outer steps do not do is refused."""
    found = {
        tuple(sorted((name, float(value)) for name, value in group.items() if isinstance(value, (int, float)) and name != "params"))
        for group in optimizer.param_groups
    }
    if len(found) != 1:
        raise oxccl.Unsupported("the outer optimizer has several groups of parameters with different settings; outer steps have one")
    group = optimizer.param_groups[0]
    kind = type(optimizer)

    def only(**wanted: Any) -> None:
        for name, value in wanted.items():
            if group.get(name, value) != value:
                raise oxccl.Unsupported(f"the outer {kind.__name__} has {name}={group[name]!r}; outer steps have {name}={value!r}")

    only(weight_decay=0, maximize=False)
    if kind is torch.optim.SGD:
        only(dampening=0, nesterov=group["momentum"] != 0)
        return ("nesterov" if group["nesterov"] else "sgd", float(group["lr"]), float(group["momentum"]))
    if kind is torch.optim.AdamW:
        only(betas=(0.9, 0.99), eps=1e-8, amsgrad=False)
        return ("adamw", float(group["lr"]), 0.0)
    raise oxccl.Unsupported(f"the outer optimizer is {kind.__name__}; outer steps are torch.optim.SGD (plain or Nesterov) or AdamW")
