"""The jobs of the step-time benchmark with two stages on each rank, under torch's own schedules."""

from __future__ import annotations

import torch
from _handwritten import CPU, Chunk, Handwritten, cross_entropy, without_memory
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage  # noqa: TID251  the side that PDSL is compared with
from torch.distributed.pipelining.schedules import (  # noqa: TID251
    PipelineScheduleMulti,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pdsl.models.gpt import GPT

__all__ = ["Chunked"]

SCHEDULES: dict[str, type[PipelineScheduleMulti]] = {
    "pp interleaved": ScheduleInterleaved1F1B,
    "pp zero-bubble": ScheduleInterleavedZeroBubble,
    "pp zbv": ScheduleZBVZeroBubble,
}
PLACES = {"pp interleaved": (0, 1, 0, 1), "pp zero-bubble": (0, 1, 0, 1), "pp zbv": (0, 1, 1, 0)}


class Chunked(Handwritten):
    def build(self, model: GPT) -> nn.Module:
        job = self.job
        places = PLACES[job.case]
        bounds = (0, *job.cuts, len(model.layers))
        mine = [i for i, at in enumerate(places) if at == self.rank]
        chunks = nn.ModuleList(Chunk(model, bounds[i], bounds[i + 1]) for i in mine)
        tokens, hidden, logits = without_memory(job, model, job.batch // job.microbatches)
        last = len(places) - 1
        stages = [
            PipelineStage(chunk, i, len(places), CPU, input_args=tokens if i == 0 else hidden, output_args=logits if i == last else hidden)
            for chunk, i in zip(chunks, mine, strict=True)
        ]
        self.first, self.last = 0 in mine, last in mine
        self.schedule = SCHEDULES[job.case](stages, job.microbatches, loss_fn=cross_entropy)
        return chunks

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        entries = (tokens,) if self.first else ()
        if not self.last:
            self.schedule.step(*entries, return_outputs=False)
            return torch.zeros(())
        self.schedule.step(*entries, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()
