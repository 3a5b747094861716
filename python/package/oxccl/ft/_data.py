"""Which samples of a data set this process takes."""

from __future__ import annotations

from typing import Any

from torch.utils import data


class DistributedSampler(data.distributed.DistributedSampler):
    """Deals a data set to the ranks of all replicas, by fixed places.

    Each takes the share of rank ``group_rank + num_replicas * replica_rank`` of ``num_replicas * num_replica_groups``. What belongs to a replica that
    is away is not trained on meanwhile.

    Args:
        dataset: the data set.
        replica_rank: the place of this replica, from 0.
        num_replica_groups: the largest number of replicas.
        group_rank: this process in its replica; by default 0, or the rank in ``torch.distributed``.
        num_replicas: the processes of a replica; by default 1, or the size of ``torch.distributed``.

    """

    def __init__(
        self, dataset: Any, replica_rank: int, num_replica_groups: int, group_rank: int | None = None, num_replicas: int | None = None, **options: Any
    ) -> None:
        import torch.distributed as dist

        is_distributed = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if is_distributed else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if is_distributed else 1
        self.global_rank: int = group_rank + num_replicas * replica_rank
        self.global_world_size: int = num_replicas * num_replica_groups
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **options)
