"""What torch does by itself where it is wrong or refuses, each as a function of one rank of a few; no part of PDSL takes part.

The small model is four Linear(8, 8) from seed 0 on eight rows from seed 1, targets zero, mean squared error.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.user_models import four_linears, four_linears_rows

__all__ = [
    "accumulated_with_scale", "clipped_per_stage", "mesh_named_backwards", "norms_on_two_meshes", "optimizer_first",
    "pattern_without_match", "replicated_halves", "statistics_of_probe", "tied_in_two_stages", "uneven_with_join",
]  # fmt: skip

Store = Any
mse = nn.functional.mse_loss


def _begin(rank: int, world: int, store: Store) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)


def _stage(module: nn.Module, index: int, stages: int, group: Any = None) -> Any:
    from torch.distributed.pipelining import PipelineStage  # noqa: TID251  the side that is wrong

    return PipelineStage(module, index, stages, torch.device("cpu"), group=group)


def _schedules() -> Any:
    from torch.distributed.pipelining import schedules  # noqa: TID251

    return schedules


def _pipeline_of_two(rank: int, model: nn.Sequential, **options: Any) -> tuple[nn.Module, Any]:
    """The first or the second half of a model as a stage, and a GPipe of four microbatches over both."""
    half = model[:2] if rank == 0 else model[2:]
    return half, _schedules().ScheduleGPipe(_stage(half, rank, 2), 4, loss_fn=mse, **options)


def _feed(rank: int, schedule: Any, x: Tensor, target: Tensor) -> None:
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)


# --- meshes, sharding and optimizers


def mesh_named_backwards(rank: int, world: int, store: Store) -> tuple[int, ...]:
    """The shape that a rank holds of an (8, 8) weight on a mesh whose first dim is called shard and has all ranks."""
    _begin(rank, world, store)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_shard", "dp_replicate"))
    module = nn.Linear(8, 8)
    fully_shard(module, mesh=mesh)
    assert isinstance(module.weight, DTensor)
    return tuple(module.weight.to_local().shape)


def optimizer_first(rank: int, world: int, store: Store) -> float:
    """The largest change of any weight by a step of an optimizer that was built before the model was sharded."""
    _begin(rank, world, store)
    module = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    assert isinstance(module.weight, DTensor)
    before = module.weight.full_tensor().detach().clone()
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return float((module.weight.full_tensor().detach() - before).abs().max())


def norms_on_two_meshes(rank: int, world: int, store: Store) -> str:
    """What `clip_grad_norm_` says of a sharded model of which one layer is split over tensor ranks too."""
    _begin(rank, world, store)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(module, mesh=mesh["shard"])
    module(torch.ones(2, 8)).sum().backward()
    try:
        return f"accepted: {float(nn.utils.clip_grad_norm_(module.parameters(), 1.0))}"
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        return "refused"


def uneven_with_join(rank: int, world: int, store: Store) -> str:
    """What is said of a sharded module within `Join`, which ends uneven batches of DDP together."""
    from torch.distributed.algorithms.join import Join

    _begin(rank, world, store)
    module = nn.Linear(8, 8)
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    try:
        with Join([module]):  # type: ignore[list-item]
            return "accepted"
    except AttributeError:
        return "refused"


def pattern_without_match(rank: int, world: int, store: Store) -> tuple[tuple[int, ...], int]:
    """The shape of a weight whose pattern has a typo, and the number of warnings."""
    _begin(rank, world, store)
    module = nn.Sequential(nn.Linear(8, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallelize_module(module, init_device_mesh("cpu", (world,)), {"first": ColwiseParallel()})
    return tuple(module[0].weight.shape), len(told)


# --- pipelines


def clipped_per_stage(rank: int, world: int, store: Store) -> float:
    """The norm that a stage of two clips to."""
    _begin(rank, world, store)
    rows = four_linears_rows().columns
    half, schedule = _pipeline_of_two(rank, four_linears())
    _feed(rank, schedule, rows["x"], rows["target"])
    return float(nn.utils.clip_grad_norm_(half.parameters(), 0.1))


def accumulated_with_scale(rank: int, world: int, store: Store, scale: bool) -> float:
    """The norm of the first weight's gradient after two steps of a schedule without an update between."""
    _begin(rank, world, store)
    rows = four_linears_rows().columns
    half, schedule = _pipeline_of_two(rank, four_linears(), scale_grads=scale)
    for _ in range(2):
        _feed(rank, schedule, rows["x"], rows["target"])
    return float(next(half.parameters()).grad.norm())  # type: ignore[union-attr]


class _Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def tied_in_two_stages(rank: int, world: int, store: Store) -> tuple[float, float]:
    """The norm of the gradient of this stage's copy of a weight that an embedding and a head share, and that of one process."""
    _begin(rank, world, store)
    embedding = nn.Embedding(11, 8)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 11, (8, 5), generator=generator) for _ in range(2))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    loss(_Head(embedding.weight)(embedding(tokens)), targets).backward()
    true = float(embedding.weight.grad.norm())  # type: ignore[union-attr]
    embedding.weight.grad = None
    module = embedding if rank == 0 else _Head(nn.Parameter(embedding.weight.detach().clone()))
    schedule = _schedules().ScheduleGPipe(_stage(module, rank, 2), 4, loss_fn=loss)
    _feed(rank, schedule, tokens, targets)
    return float(module.weight.grad.norm()), true  # type: ignore[union-attr, operator]


def statistics_of_probe(rank: int, world: int, store: Store) -> int:
    """How many batches a BatchNorm in the first stage has counted after one step of four microbatches."""
    _begin(rank, world, store)
    rows = four_linears_rows().columns
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
    half, schedule = _pipeline_of_two(rank, model)
    _feed(rank, schedule, rows["x"], rows["target"])
    return int(half[1].num_batches_tracked) if rank == 0 else -1  # type: ignore[index]


def replicated_halves(rank: int, world: int, store: Store, name: str) -> list[float]:
    """For each stage the largest difference of gradients between the two replicas of it, under DDP and a schedule with split backward."""
    from torch.nn.parallel import DistributedDataParallel

    _begin(rank, world, store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rows = four_linears_rows().columns
    model, at = four_linears(), mesh.get_local_rank("pp")
    modules = [DistributedDataParallel(nn.Sequential(model[i]), process_group=mesh.get_group("dp")) for i in (at, at + 2)]
    stages = [_stage(m, i, 4, mesh.get_group("pp")) for m, i in zip(modules, (at, at + 2), strict=True)]
    schedule = getattr(_schedules(), name)(stages, 4, loss_fn=mse)
    x, target = (rows[n].chunk(2)[mesh.get_local_rank("dp")] for n in ("x", "target"))
    _feed(at, schedule, x, target)
    found = []
    for module in modules:
        grad = module.module[0].weight.grad
        both = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(both, grad, group=mesh.get_group("dp"))
        found.append(float((both[0] - both[1]).abs().max()))
    return found
