"""The jobs of the step-time benchmark: one model, one plan, said twice."""

from __future__ import annotations

from attrs import frozen

__all__ = ["CASES", "MODELS", "SCHEDULES", "SPLIT", "Job"]

CASES = {
    "ddp": "DistributedDataParallel, 2 ranks",
    "fsdp": "fully_shard, 2 ranks",
    "pp": "1F1B, 2 stages, 4 microbatches",
    "pp interleaved": "interleaved 1F1B, 2 stages on each of 2 ranks, 4 microbatches",
    "pp zero-bubble": "interleaved zero-bubble, 2 stages on each of 2 ranks, 4 microbatches",
    "pp zbv": "zero-bubble in a V, 2 stages on each of 2 ranks, 4 microbatches",
    "pp+fsdp": "fully_shard and 1F1B, 4 ranks",
    "pp+fsdp+tp": "both with split matrices, 8 ranks",
}

# by name: arguments of pdsl.models:gpt; the first is the model of the quickstart, the second has ten times its parameters
MODELS = {
    "1M": {"layers": 5, "width": 128, "heads": 4, "context": 64},
    "10M": {"layers": 7, "width": 352, "heads": 8, "context": 64},
}

_MESH = {
    "ddp": "axis dp = 2",
    "fsdp": "axis fsdp = 2",
    "pp": "axis pp = 2",
    "pp+fsdp": "axis pp = 2; axis fsdp = 2",
    "pp+fsdp+tp": "axis pp = 2; axis fsdp = 2; axis tp = 2",
}

_RULES = {"ddp": '"**" => replicate()', "fsdp": '"**" => fsdp(fsdp)', "pp": '"**" => replicate()', "pp+fsdp": '"**" => fsdp(fsdp)'}

# style -> the matrices of a block that are split so
SPLIT = {"colwise": ("attn.wq", "attn.wk", "attn.wv", "mlp.w1"), "rowwise": ("attn.wo", "mlp.w2")}
_RULES["pp+fsdp+tp"] = "; ".join(
    (*(f'"layers.*.{m}.weight" => {style}(tp) + fsdp(fsdp)' for style, modules in SPLIT.items() for m in modules), _RULES["fsdp"])
)


# schedules with two stages on each rank, in the language of PDSL
SCHEDULES = {
    "pp interleaved": "interleaved_1f1b(microbatches = 4, virtual = 2)",
    "pp zero-bubble": "interleaved_zero_bubble(microbatches = 4, virtual = 2)",
    "pp zbv": "zbv(microbatches = 4)",
}
_MESH |= dict.fromkeys(SCHEDULES, _MESH["pp"])
_RULES |= dict.fromkeys(SCHEDULES, _RULES["pp"])


@frozen
class Job:
    """What both sides train. `cuts` are the numbers of blocks before each stage but the first; they are read from the plan, so that both cut alike."""

    case: str
    size: str
    batch: int = 16
    seed: int = 17
    rate: float = 1e-4
    decay: float = 0.1
    cuts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.case} {self.size}"

    @property
    def model(self) -> dict[str, int]:
        return MODELS[self.size]

    @property
    def ranks(self) -> int:
        return {"pp+fsdp": 4, "pp+fsdp+tp": 8}.get(self.case, 2)

    @property
    def stages(self) -> int:
        return 4 if self.case in SCHEDULES else 2

    @property
    def microbatches(self) -> int:
        return 4 if self.case.startswith("pp") else 1

    def spec(self) -> str:
        """The job in the language of PDSL. Clipping is off, as it is on the other side."""
        arguments = "; ".join(f"{k} = {v}" for k, v in self.model.items())
        schedule = SCHEDULES.get(self.case, f"one_f_one_b(microbatches = {self.microbatches})")
        pipeline = "" if self.microbatches == 1 else f"pipeline over pp {{ schedule = {schedule} }}"
        return f"""
pdsl 1
mesh {{ {_MESH[self.case]} }}
model "pdsl.models:gpt" {{ {arguments} }}
shard {{ {_RULES[self.case]} }}
{pipeline}
train {{
  data      = source("pdsl.data:python_source", context = {self.model["context"]})
  batch     = {self.batch}
  steps     = 1000
  optimizer = adamw(lr = {self.rate:f}, weight_decay = {self.decay})
  seed      = {self.seed}
}}
"""
