"""A training state as tensors and a text that says where they belong, and back.

Nested dicts, lists and tuples of tensors, numbers, texts, bytes and None. Nothing of it is code: what is not one of these is refused by its
place, unless the caller trusts the other replicas and asks for pickle. Of a `DTensor` this rank's part travels, to the same rank of another replica.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from oxccl.torch import _calls

Memory = tuple[str, list[int], Any]
"""A tensor's name, its shape, and its elements in host memory."""
Loaded = tuple[str, str, list[int], bytearray]
"""A tensor's name, element type, shape and bytes."""

_BY_NAME: dict[str, Any] = {name: dtype for dtype, name in _calls._DTYPES}
_KNOWN = set(_BY_NAME.values())
_PLAIN = (type(None), bool, int, float, str)
_KEYS = (str, int, bool, float, type(None))


def _is_dtensor(value: Any) -> bool:
    # Its module takes a second to import; who has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _slice(mesh: Any, names: Sequence[str] | None) -> Any:
    """The dimensions `names` of `mesh`; None if it has no such."""
    return mesh[tuple(names)] if names and set(names) <= set(mesh.mesh_dim_names) else None


class _Encoder:
    def __init__(self, allow_pickle: bool, meshes: Sequence[Any]) -> None:
        self.allow_pickle = allow_pickle
        self.meshes = meshes
        self.tensors: list[Memory] = []
        self.names: set[str] = set()

    def add(self, path: str, shape: list[int], memory: Any) -> str:
        name = path if path not in self.names else f"{path}#{len(self.names)}"
        self.names.add(name)
        self.tensors.append((name, shape, memory))
        return name

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if _is_dtensor(value):
            return self.dtensor(value, path)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if kind is dict or kind is OrderedDict:
            items = []
            for key, item in value.items():
                if type(key) not in _KEYS:
                    raise TypeError(f"{path} has a key of type {type(key).__name__}; keys are texts, numbers or None")
                items.append([key, self.encode(item, f"{path}/{key}")])
            return {"dict": items}
        if kind is list:
            return {"list": [self.encode(item, f"{path}/{n}") for n, item in enumerate(value)]}
        if kind is tuple or kind is torch.Size:
            return {"tuple": [self.encode(item, f"{path}/{n}") for n, item in enumerate(value)]}
        if kind is bytes:
            return {"bytes": self.bytes(value, path)}
        if self.allow_pickle:
            return {"pickle": self.bytes(pickle.dumps(value), path)}
        raise TypeError(
            f"{path} is of type {kind.__module__}.{kind.__qualname__}, which does not travel to other replicas: give tensors, numbers, texts, bytes, "
            "None, and dicts, lists and tuples of them; or Manager(allow_pickle=True), with which any replica can run code in this one"
        )

    def tensor(self, value: Any, path: str) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TypeError(f"{path} is a {type(value).__name__}; give the plain tensor that it stands for (of a DTensor the local part)")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(f"{path} is a tensor of layout {value.layout} on {value.device}; dense tensors with elements travel")
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        if value.dtype in _KNOWN:
            return {"tensor": self.add(path, list(value.shape), flat)}
        # Any other element type travels as bytes, under its name.
        raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": self.add(path, [raw.numel()], raw), "dtype": dtype, "shape": list(value.shape)}

    def dtensor(self, value: Any, path: str) -> Any:
        mesh = value.device_mesh
        if not any(_slice(known, mesh.mesh_dim_names) == mesh for known in self.meshes):
            raise TypeError(f"{path} is a DTensor over {mesh}, which is no mesh of ft_init_device_mesh; give its local part")
        placements = []
        for placement in value.placements:
            if type(placement).__name__ not in ("Shard", "Replicate"):
                raise TypeError(f"{path} is a DTensor placed as {placement}; shards and copies travel")
            placements.append(placement.dim if placement.is_shard() else None)
        local = self.tensor(value.detach().to_local(), path)
        whole = {"shape": list(value.shape), "stride": list(value.stride())}
        return {"dtensor": local, "names": list(mesh.mesh_dim_names), "placements": placements, **whole}

    def bytes(self, value: bytes, path: str) -> str:
        return self.add(path, [len(value)], bytearray(value))


def encode(states: dict[str, Any], *, allow_pickle: bool = False, meshes: Sequence[Any] = ()) -> tuple[list[Memory], str]:
    """The tensors of `states`, and the text that says where they belong. Raises `TypeError` that names the place of what cannot travel."""
    encoder = _Encoder(allow_pickle, meshes)
    tree = {key: encoder.encode(value, key) for key, value in states.items()}
    return encoder.tensors, json.dumps(tree)


class _Decoder:
    def __init__(self, tensors: Sequence[Loaded], allow_pickle: bool, meshes: Sequence[Any]) -> None:
        self.allow_pickle = allow_pickle
        self.meshes = meshes
        self.tensors = {name: (dtype, shape, data) for name, dtype, shape, data in tensors}

    def decode(self, value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value
        kind = next(iter(value))
        held = value[kind]
        if kind == "tensor":
            return self.tensor(held, value, path)
        if kind == "dtensor":
            return self.dtensor(value, path)
        if kind == "dict":
            return {key: self.decode(item, f"{path}/{key}") for key, item in held}
        if kind in ("list", "tuple"):
            items = [self.decode(item, f"{path}/{n}") for n, item in enumerate(held)]
            return items if kind == "list" else tuple(items)
        if kind == "bytes":
            return bytes(self.tensors[held][2])
        if kind == "pickle" and self.allow_pickle:
            return pickle.loads(self.tensors[held][2])
        raise TypeError(f"{path} came as {kind}, which this replica does not take: all replicas of a job run the same program with the same options")

    def tensor(self, name: str, value: dict[str, Any], path: str) -> Any:
        dtype, shape, data = self.tensors[name]
        wanted = getattr(torch, value["dtype"], None) if "dtype" in value else _BY_NAME.get(dtype)
        if not isinstance(wanted, torch.dtype):
            raise TypeError(f"{path} came with elements of type {value.get('dtype', dtype)}, which this torch does not know")
        shape = value.get("shape", shape)
        if not data:
            return torch.empty(shape, dtype=wanted)
        return torch.frombuffer(data, dtype=wanted).reshape(shape)

    def dtensor(self, value: dict[str, Any], path: str) -> Any:
        mesh = next((found for known in self.meshes if (found := _slice(known, value["names"])) is not None), None)
        if mesh is None:
            raise TypeError(f"{path} came as a DTensor over the dimensions {value['names']}, which no mesh of ft_init_device_mesh has here")
        from torch.distributed.tensor import DTensor, Replicate, Shard

        local = self.decode(value["dtensor"], path)
        placements = [Replicate() if dim is None else Shard(dim) for dim in value["placements"]]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(value["shape"]), stride=tuple(value["stride"]))


def decode(tensors: Sequence[Loaded], tree: str, *, allow_pickle: bool = False, meshes: Sequence[Any] = ()) -> dict[str, Any]:
    """What `encode` was given, with tensors in host memory."""
    decoder = _Decoder(tensors, allow_pickle, meshes)
    return {key: decoder.decode(value, key) for key, value in json.loads(tree).items()}
