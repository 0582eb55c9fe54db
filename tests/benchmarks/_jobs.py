"""The jobs of the step-time benchmark: one model, one plan, said twice."""

from __future__ import annotations

from attrs import frozen

__all__ = ["CASES", "MODELS", "Job"]

CASES = {"fsdp": "fully_shard, 2 ranks", "pp": "1F1B, 2 stages, 4 microbatches", "pp+fsdp": "both, 4 ranks"}

# by name: arguments of pdsl.models:gpt; the first is the model of the quickstart, the second has ten times its parameters
MODELS = {
    "1M": {"layers": 5, "width": 128, "heads": 4, "context": 64},
    "10M": {"layers": 7, "width": 352, "heads": 8, "context": 64},
}

_MESH = {"fsdp": "axis fsdp = 2", "pp": "axis pp = 2", "pp+fsdp": "axis pp = 2; axis fsdp = 2"}


@frozen
class Job:
    """What both sides train. `cut` is the number of blocks in the first stage; it is read from the plan, so that both cut alike."""

    case: str
    size: str
    batch: int = 16
    seed: int = 17
    rate: float = 1e-4
    decay: float = 0.1
    cut: int = 0

    @property
    def name(self) -> str:
        return f"{self.case} {self.size}"

    @property
    def model(self) -> dict[str, int]:
        return MODELS[self.size]

    @property
    def ranks(self) -> int:
        return 4 if self.case == "pp+fsdp" else 2

    @property
    def microbatches(self) -> int:
        return 1 if self.case == "fsdp" else 4

    def spec(self) -> str:
        """The job in the language of PDSL. Clipping is off, as it is on the other side."""
        arguments = "; ".join(f"{k} = {v}" for k, v in self.model.items())
        layout = "replicate()" if self.case == "pp" else "fsdp(fsdp)"
        pipeline = "" if self.case == "fsdp" else f"pipeline over pp {{ schedule = one_f_one_b(microbatches = {self.microbatches}) }}"
        return f"""
pdsl 1
mesh {{ {_MESH[self.case]} }}
model "pdsl.models:gpt" {{ {arguments} }}
shard {{ "**" => {layout} }}
{pipeline}
train {{
  data      = source("pdsl.data:python_source", context = {self.model["context"]})
  batch     = {self.batch}
  steps     = 1000
  optimizer = adamw(lr = {self.rate:f}, weight_decay = {self.decay})
  seed      = {self.seed}
}}
"""
