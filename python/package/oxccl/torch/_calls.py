"""The operations of torch's process groups over a group of oxccl: what is common to `Backend` and `ProcessGroup`.

A call that torch makes synchronously (``opts.asyncOp`` is false) runs on the calling thread; any other comes back as a `Work`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import oxccl
from oxccl import _oxccl
from oxccl.torch._work import Work, Works

_DTYPES = [
    (torch.float64, "f64"),
    (torch.float32, "f32"),
    (torch.float16, "f16"),
    (torch.bfloat16, "bf16"),
    (torch.int64, "i64"),
    (torch.int32, "i32"),
    (torch.int16, "i16"),
    (torch.int8, "i8"),
    (torch.uint64, "u64"),
    (torch.uint32, "u32"),
    (torch.uint16, "u16"),
    (torch.uint8, "u8"),
    (torch.bool, "bool"),
    (torch.float8_e4m3fn, "f8e4m3"),
    (torch.float8_e5m2, "f8e5m2"),
]
_oxccl._know_torch(torch.Tensor, _DTYPES)
_NAMES = dict(_DTYPES)

# By the numbers of torch's reductions, which are their hashes.
_REDUCTIONS: list[_oxccl.Reduction] = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
_DONE = Works(())

_ALL_REDUCE = c10d.AllreduceOptions()
_COALESCED = c10d.AllreduceCoalescedOptions()
_BROADCAST = c10d.BroadcastOptions()
_REDUCE = c10d.ReduceOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_GATHER = c10d.GatherOptions()
_SCATTER = c10d.ScatterOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_BARRIER = c10d.BarrierOptions()

Tensor = Any
Options = Any


def memory(group: oxccl.Group, size: int | Sequence[int], dtype: Any) -> oxccl.Memory:
    """Memory of `group` for a tensor of torch."""
    name = _NAMES.get(dtype)
    if name is None:
        raise oxccl.Unsupported(
            f"no operation takes {dtype}; complex numbers are pairs: torch.view_as_complex of a tensor with a last dimension of 2"
        )
    return group.alloc(size, name)


def alloc(group: oxccl.Group, size: int | Sequence[int], dtype: Any) -> Tensor:
    """A tensor of zeros that the other ranks of this host read in place, where `group` has such memory; it lives as long as any view of it."""
    return torch.from_dlpack(memory(group, size, dtype))


def reduction(op: Any) -> _oxccl.Reduction:
    """Our name of one of torch's reductions."""
    number = hash(op)
    if number < len(_REDUCTIONS):
        return _REDUCTIONS[number]
    factor = op.factor if hasattr(op, "factor") else None
    if isinstance(factor, (int, float)):
        return oxccl.PremulSum(factor)
    raise oxccl.Unsupported(f"{op} is no reduction of oxccl; known: sum, avg, product, min, max, band, bor, bxor, premul_sum with a number")


def _rows(splits: Sequence[int], tensor: Tensor) -> list[int] | None:
    """Splits in rows of `tensor` as splits in elements; none for even ones."""
    if not splits:
        return None
    rows = tensor.size(0) if tensor.dim() else 1
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]


def _apart(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """`inputs`, with a copy in the place of each that shares memory with an output (as in FSDP's gathers) or with another input."""
    taken = [(at := t.data_ptr(), at + t.nbytes) for t in outputs]
    found = []
    for tensor in inputs:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        if any(begin < other_end and other < end for other, other_end in taken):
            tensor = tensor.clone()
        else:
            taken.append((begin, end))
        found.append(tensor)
    return found


def _is_whole(output: Tensor, input: Tensor, ranks: int) -> bool:
    """Whether `output` has room for exactly the inputs of all ranks."""
    return bool(output.nbytes == ranks * input.nbytes and output.dtype == input.dtype and output.is_contiguous() and input.is_contiguous())


class Calls:
    """Every operation. `_group` is the group they go over."""

    _group: oxccl.Group
    _batch: list[dist.Work] | None = None
    """What was submitted since `start_coalescing`."""

    def _run(self, call: Callable[..., Any], outputs: Sequence[Tensor], opts: Options, *arguments: Any, **more: Any) -> dist.Work:
        """Runs `call` here, or submits it."""
        if opts.asyncOp or self._batch is not None:
            return self._noted(Work(call(*arguments, timeout=opts.timeout, async_op=True, **more), outputs))
        call(*arguments, timeout=opts.timeout, **more)
        return _DONE

    def _run_pair(self, call: Callable[..., Any], output: Tensor, input: Tensor, opts: Options, *arguments: Any, **more: Any) -> dist.Work:
        """Runs `call`. Two that share memory are refused before anything is done: then once more with a copy of the input."""
        try:
            return self._run(call, [output], opts, input, output, *arguments, **more)
        except oxccl.InvalidArgument:
            (apart,) = _apart([input], [output])
            if apart is input:
                raise
            return self._run(call, [output], opts, apart, output, *arguments, **more)

    def _noted(self, work: dist.Work) -> dist.Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Options = _ALL_REDUCE) -> dist.Work:
        """Every tensor becomes the reduction over all ranks."""
        if opts.asyncOp or self._batch is not None:
            return self._run(self._group.all_reduce, tensors, opts, tensors, reduction(opts.reduceOp))
        # The shortest way for the commonest call.
        self._group.all_reduce(tensors, reduction(opts.reduceOp), timeout=opts.timeout)
        return _DONE

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = _COALESCED) -> dist.Work:
        """Every tensor becomes the reduction over all ranks; all of them are one operation."""
        return self._run(self._group.all_reduce, tensors, opts, tensors, reduction(opts.reduceOp))

    def allreduce_sparse(self, tensors: list[Tensor], opts: Options = _ALL_REDUCE) -> dist.Work:
        """Refused."""
        raise oxccl.Unsupported("oxccl reduces no sparse tensors; make them dense first")

    def broadcast(self, tensors: list[Tensor], opts: Options = _BROADCAST) -> dist.Work:
        """Every rank's tensors become the root's."""
        return self._run(self._group.broadcast, tensors, opts, tensors, opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Options = _REDUCE) -> dist.Work:
        """The root's tensor becomes the reduction."""
        return self._run(self._group.reduce, tensors, opts, tensors[0], opts.rootRank, reduction(opts.reduceOp))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = _ALL_GATHER) -> dist.Work:
        """``outputs[0][r]`` becomes rank r's input."""
        return self._run(self._group.all_gather, outputs[0], opts, _apart(inputs, outputs[0])[0], outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = _ALL_GATHER) -> dist.Work:
        """`output` becomes the inputs of all ranks, one after the other."""
        group = self._group
        if input.data_ptr() == output.data_ptr() + group.rank * input.nbytes and _is_whole(output, input, group.world_size):
            # As FSDP gathers: the input is this rank's part of the output.
            return self._run(group.all_gather_in_place, [output], opts, output)
        return self._run_pair(group.all_gather_into, output, input, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = _ALL_GATHER) -> dist.Work:
        """As `all_gather_single` for several tensors; all of them are one operation."""
        return self._run(self._group.all_gather_into, outputs, opts, _apart(inputs, outputs), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = _ALL_GATHER) -> dist.Work:
        """``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        ranks = range(len(outputs))
        return Works([self.allgather([[outputs[r][i] for r in ranks]], [tensor], opts) for i, tensor in enumerate(inputs)])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = _GATHER) -> dist.Work:
        """On the root ``outputs[0][r]`` becomes rank r's input."""
        found = outputs[0] if outputs else None
        return self._run(self._group.gather, found or [], opts, _apart(inputs, found or [])[0], found, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = _SCATTER) -> dist.Work:
        """The output becomes the root's ``inputs[0][own rank]``."""
        given = _apart(inputs[0], outputs) if inputs else None
        return self._run(self._group.scatter, outputs, opts, given, output=outputs[0], root=opts.rootRank)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = _REDUCE_SCATTER) -> dist.Work:
        """The output becomes the reduction of all ranks' ``inputs[0][own rank]``."""
        return self._run(self._group.reduce_scatter, outputs, opts, _apart(inputs[0], outputs), outputs[0], reduction(opts.reduceOp))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = _REDUCE_SCATTER) -> dist.Work:
        """`output` becomes this rank's part of the reduction of `input`."""
        return self._run_pair(self._group.reduce_scatter_into, output, input, opts, reduction(opts.reduceOp))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = _REDUCE_SCATTER) -> dist.Work:
        """As `reduce_scatter_single` for several tensors; all of them are one operation."""
        return self._run(self._group.reduce_scatter_into, outputs, opts, _apart(inputs, outputs), outputs, reduction(opts.reduceOp))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Options = _ALL_TO_ALL
    ) -> dist.Work:
        """Part r of `output` becomes rank r's part of `input` for this rank; splits are in rows."""
        if not input_splits and not output_splits:
            return self._run_pair(self._group.all_to_all_into, output, input, opts)
        splits = {"input_splits": _rows(input_splits, input), "output_splits": _rows(output_splits, output)}
        return self._run_pair(self._group.all_to_all_into, output, input, opts, **splits)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = _ALL_TO_ALL) -> dist.Work:
        """``outputs[r]`` becomes rank r's ``inputs[own rank]``."""
        return self._run(self._group.all_to_all, outputs, opts, _apart(inputs, outputs), outputs)

    def barrier(self, opts: Options = _BARRIER) -> dist.Work:
        """Waits for all ranks."""
        return self._run(self._group.barrier, [], opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Sends the tensor."""
        return self._noted(Work(self._group.send(tensors[0], peer, tag, async_op=True), tensors))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Receives the tensor."""
        return self._noted(Work(self._group.recv(tensors[0], peer, tag, async_op=True), tensors))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receives the tensor from the first rank that sends with the tag."""
        return self._noted(Work(self._group.recv(tensors[0], None, tag, async_op=True), tensors))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; at the time-out the error names those that are missing."""
        self._group.monitored_barrier(wait_all=wait_all_ranks, timeout=timeout)

    def start_coalescing(self, device: Any = None) -> None:
        """Operations up to `end_coalescing` are submitted without waiting."""
        self._batch = []

    def end_coalescing(self, device: Any = None) -> dist.Work:
        """Everything since `start_coalescing` as one work."""
        works, self._batch = self._batch or [], None
        return Works(works)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may take whose call names no time."""
        self._group._set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Ends all operations in flight and refuses further ones; peers are told. Returns at once."""
        self._group.abort("aborted through torch.distributed")

    def shutdown(self) -> None:
        """Ends the group. Returns at once: what is in flight is cut short."""
        with contextlib.suppress(oxccl.Timeout):
            self._group.shutdown(0)

    def getBackendName(self) -> str:
        """``oxccl``."""
        return "oxccl"

    def get_error(self) -> Any:
        """Whether an operation has failed, in torch's terms."""
        error = self._group.error
        if error is None:
            return c10d.ErrorType.SUCCESS
        return c10d.ErrorType.TIMEOUT if error.kind == "Timeout" else c10d.ErrorType.COMM_ERROR
