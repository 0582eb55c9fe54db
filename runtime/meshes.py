"""The island of a rank as torch's WORLD, and meshes over some of its axes for FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from pdsl.lowering.plan import MeshAxis, Plan

__all__ = ["IslandMesh", "island_mesh", "leave_island", "mesh_dim"]


class IslandMesh:
    """Meshes of one dim over the ranks of an island, by name: see `mesh_dim`."""

    def __init__(self, device_type: str, meshes: Mapping[str, DeviceMesh]) -> None:
        self.device_type = device_type
        self._meshes = dict(meshes)

    def __getitem__(self, name: str) -> DeviceMesh:
        return self._meshes[name]


def island_mesh(
    plan: Plan, island: Sequence[int], rank: int, store: dist.Store, device: torch.device, timeout: timedelta
) -> IslandMesh | None:
    """Make torch's WORLD from the island of a rank: its DeviceMesh with dims `shard` and `tensor` where they have several ranks, and `shard.NAME`, `tensor.NAME` for each axis of a role that has several, or None for an island of one rank, which
    needs no WORLD. An island stays together through all plans; it is only made anew if it was cut short inside a collective.
    """
    if len(island) == 1:
        return None
    prefix = dist.PrefixStore(f"island{island[0]}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=prefix, rank=island.index(rank), world_size=len(island), timeout=timeout)
    shard, tensor = _dims("shard", plan.shard_axes, plan.shard_size), _dims("tensor", plan.tensor_axes, plan.tensor_size)
    mesh = init_device_mesh(device.type, (*shard.values(), *tensor.values()), mesh_dim_names=(*shard, *tensor))
    found = {name: mesh[name] for name in (*shard, *tensor)}
    several = [(role, dims) for role, dims in (("shard", tuple(shard)), ("tensor", tuple(tensor))) if len(dims) > 1]
    subsets = [(mesh_dim(role, named), tuple(f"{role}.{n}" for n in named)) for role, named in _subsets(plan)]
    for name, dims in (*several, *subsets):
        found[name] = mesh[dims]._flatten(name)
    return IslandMesh(device.type, found)


def leave_island() -> None:
    """End torch's WORLD, if there is one. Its groups end, with their threads and sockets, when no module is left that was sharded over it."""
    _clear_sharding_prop_cache()  # torch keeps the meshes of all that it has ever sharded
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_dim(role: str, axes: Sequence[str]) -> str:
    """The mesh dim over some axes of a role, named in the order of the mesh; over all of them if none are named."""
    return ".".join((role, *axes))


def _subsets(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """The sets of some, but more than one, of a role's axes that layouts use, in one order on all ranks."""
    found = {("shard", layout.shard_axes) for layout in plan.layouts}
    orders = {("tensor", axes) for layout in plan.layouts for _, axes in layout.splits}
    orders |= {("tensor", plan.facts.tensor.sequence)} if plan.facts.tensor is not None else set()
    found |= {(role, tuple(a.name for a in plan.tensor_axes if a.name in axes)) for role, axes in orders}
    return sorted((role, axes) for role, axes in found if 1 < len(axes) < len(plan.shard_axes if role == "shard" else plan.tensor_axes))


def _dims(role: str, axes: Sequence[MeshAxis], size: int) -> dict[str, int]:
    """Names and sizes of the mesh dims of a role: one, under the name of the role, or one for each axis; none for one rank, which exchanges nothing."""
    if len(axes) > 1:
        return {f"{role}.{axis.name}": axis.size for axis in axes}
    return {role: size} if size > 1 else {}
