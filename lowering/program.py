"""Programs: one rank's list of actions for one step, with every peer named.

Explicit peers are what lets pipelines differ in length and microbatches change owner: the executor never computes a neighbour, it reads it.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["Action", "ActionKind", "Bucket", "Program", "Stream"]


class ActionKind(Enum):
    """What an action does, with the letters of the drawings."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    STEP = "STEP"


class Stream(Enum):
    """What an action occupies; actions of different streams overlap."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    REDUCE = "reduce"


_STREAMS = {
    ActionKind.SEND_ACTIVATION: Stream.TRANSFER,
    ActionKind.RECEIVE_ACTIVATION: Stream.TRANSFER,
    ActionKind.SEND_GRADIENT: Stream.TRANSFER,
    ActionKind.RECEIVE_GRADIENT: Stream.TRANSFER,
    ActionKind.UNSHARD: Stream.REDUCE,
    ActionKind.RESHARD: Stream.REDUCE,
    ActionKind.REDUCE: Stream.REDUCE,
}


@frozen
class Action:
    """One thing a rank does. `microbatch` is the global id; `peer` the rank at the other end of a transfer; `bucket` an index into the
    program's buckets. Fields that mean nothing for a kind are -1.
    """

    kind: ActionKind
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    bucket: int = -1

    @property
    def stream(self) -> Stream:
        return _STREAMS.get(self.kind, Stream.COMPUTE)

    def __str__(self) -> str:
        if self.kind is ActionKind.STEP:
            return "STEP"
        if self.kind is ActionKind.REDUCE:
            return f"REDUCE#{self.bucket}"
        if self.kind in (ActionKind.UNSHARD, ActionKind.RESHARD):
            return f"{self.stage}{self.kind.value}"
        at = f"@{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{at}"


@frozen
class Bucket:
    """Parameters whose gradients are summed together over the same ranks. `stages` are the stages of this rank that must have finished
    their last backward before the sum may start.
    """

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    stages: tuple[int, ...]


@frozen
class Program:
    """All actions of one rank in execution order, and the buckets they name."""

    rank: int
    actions: tuple[Action, ...]
    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        return " ".join(str(a) for a in self.actions)
