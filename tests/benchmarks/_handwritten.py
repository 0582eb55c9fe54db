"""The jobs of the step-time benchmark as a careful engineer writes them with torch alone. Nothing of PDSL's runtime is used here.

- `Replicated`: DDP over all ranks, gradients as views of its buckets.
- `Sharded`: FSDP2 over all ranks, `fully_shard` on each block and on the root, defaults.
- `Piped`: two stages under torch's own 1F1B, static shapes, the model cut by hand.
- `PipedSharded`: both, on a (pp, fsdp) mesh, with parameters kept gathered between microbatches.
- `PipedShardedSplit`: the same with the matrices of each block split by columns and rows, on a (pp, fsdp, tp) mesh.

All use fused AdamW, drop gradients by setting them to None and report the mean loss over the global batch, one all-reduce a step that runs while
the optimizer writes. Each takes only the rows of its own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from _jobs import SCHEDULES, SPLIT, Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: TID251  the side that PDSL is compared with
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pdsl.models import gpt
from pdsl.models.gpt import GPT, rotation_table

__all__ = ["handwritten"]

CPU = torch.device("cpu")


def handwritten(job: Job, rank: int, store: dist.Store) -> Handwritten:
    """The job's torch side for one rank; makes torch's WORLD over all its ranks."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timedelta(seconds=60))
    kinds: dict[str, type[Handwritten]] = {
        "ddp": Replicated, "fsdp": Sharded, "pp": Piped, "pp+fsdp": PipedSharded, "pp+fsdp+tp": PipedShardedSplit,
    }  # fmt: skip
    if job.case in SCHEDULES:
        from _handwritten_chunks import Chunked  # which needs this module

        return Chunked(job, rank)
    return kinds[job.case](job, rank)


class Handwritten:
    """What they have in common: optimizer, loss, the step."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        torch.manual_seed(job.seed)
        module = self.build(gpt(**job.model))
        self.optimizers = [
            torch.optim.AdamW(group, lr=job.rate, weight_decay=job.decay, fused=True) for group in self.parameters(module) if group
        ]

    def parameters(self, module: nn.Module) -> list[list[nn.Parameter]]:
        """The parameters of a rank, in groups that one call of the optimizer can update."""
        return [list(module.parameters())]

    def build(self, model: GPT) -> nn.Module:
        raise NotImplementedError

    def rows(self, tokens: Tensor) -> Tensor:
        """This rank's rows of a global batch."""
        raise NotImplementedError

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients of one step; this rank's share of the loss of the step, a scalar."""
        raise NotImplementedError

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One step on this rank's rows: the loss over the global batch, the same on all ranks."""
        loss = self.forward_backward(tokens, targets)
        work = dist.all_reduce(loss, async_op=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        work.wait()
        return loss.item()


class Replicated(Handwritten):
    def build(self, model: GPT) -> nn.Module:
        self.model: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(self.job.ranks)[self.rank].contiguous()

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(tokens, targets)
        loss.backward()
        return loss.detach() / self.job.ranks


class Sharded(Replicated):
    def build(self, model: GPT) -> nn.Module:
        for block in model.layers:
            fully_shard(block)
        self.model = fully_shard(model)
        return model


class Chunk(nn.Module):
    """Some blocks; the first chunk begins with the embedding, the last ends with norm and projection."""

    def __init__(self, model: GPT, start: int, stop: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.layers = model.layers[start:stop]
        self.tok_embeddings = model.tok_embeddings if start == 0 else None
        self.norm, self.output = (model.norm, model.output) if stop == len(model.layers) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        rotation = rotation_table(x.shape[1], self.head_dim, x.device)
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x, rotation)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def without_memory(job: Job, model: GPT, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """What goes into the first chunk for so many rows, what crosses, and what comes out of the last."""
    width, context, vocabulary = job.model["width"], job.model["context"], model.output.out_features
    tokens = torch.empty(batch, context, dtype=torch.int64, device="meta")
    hidden = torch.empty(batch, context, width, device="meta", requires_grad=True)
    return tokens, hidden, torch.empty(batch, context, vocabulary, device="meta")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Piped(Handwritten):
    def build(self, model: GPT) -> nn.Module:
        job = self.job
        self.make_mesh()
        first = self.stage == 0
        module = Chunk(model, 0, job.cuts[0]) if first else Chunk(model, job.cuts[0], len(model.layers))
        self.shard(module)
        tokens, hidden, logits = without_memory(job, model, job.batch // job.microbatches // self.shards)
        stage = PipelineStage(
            module, self.stage, 2, CPU, input_args=tokens if first else hidden, output_args=hidden if first else logits, group=self.pipeline
        )
        self.schedule = Schedule1F1B(stage, job.microbatches, loss_fn=cross_entropy)
        return module

    def make_mesh(self) -> None:
        self.stage, self.shard_at, self.shards = self.rank, 0, 1
        self.pipeline: dist.ProcessGroup | None = None

    def shard(self, module: Chunk) -> None:
        """Nothing to shard."""

    def rows(self, tokens: Tensor) -> Tensor:
        # each microbatch is split over the shards, as PDSL does it, so that both see the same rows in the same sums
        microbatches = tokens.chunk(self.job.microbatches)
        return torch.cat([m.chunk(self.shards)[self.shard_at] for m in microbatches])

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.stage == 0:
            self.schedule.step(tokens, return_outputs=False)
            return torch.zeros(())
        losses: list[Tensor] = []
        self.schedule.step(target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() / self.shards


class PipedSharded(Piped):
    def make_mesh(self) -> None:
        self.shards = self.job.ranks // 2
        self.mesh = init_device_mesh("cpu", (2, self.shards), mesh_dim_names=("pp", "fsdp"))
        self.stage, self.shard_at = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("fsdp")
        self.pipeline = self.mesh.get_group("pp")

    def shard(self, module: Chunk) -> None:
        wrap: Callable[[nn.Module], object] = lambda m: fully_shard(m, mesh=self.mesh["fsdp"], reshard_after_forward=False)  # noqa: E731
        for layer in module.layers:
            wrap(layer)
        wrap(module)


class PipedShardedSplit(PipedSharded):
    def make_mesh(self) -> None:
        self.shards, self.splits = 2, 2
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        self.stage, self.shard_at = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("fsdp")
        self.pipeline = self.mesh.get_group("pp")

    def shard(self, module: Chunk) -> None:
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {name: styles[style]() for style, names in SPLIT.items() for name in names}
        for layer in module.layers:
            parallelize_module(layer, self.mesh["tp"], plan)
        super().shard(module)

    def parameters(self, module: nn.Module) -> list[list[nn.Parameter]]:
        """A fused update takes tensors of one mesh."""
        found: dict[int, list[nn.Parameter]] = {1: [], 2: []}
        for p in module.parameters():
            found[p.device_mesh.ndim].append(p)  # type: ignore[attr-defined]
        return list(found.values())

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward_backward(tokens, targets) / self.splits
