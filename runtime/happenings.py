"""What happens to an agent, and what it does about it: the two sides of the state machine in `membership`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from pdsl.runtime.wire import Message

__all__ = [
    "Action",
    "Closed",
    "Connected",
    "End",
    "Event",
    "Heard",
    "Host",
    "Hosted",
    "Leave",
    "Note",
    "RankBeat",
    "RankDone",
    "RankEnded",
    "RankReported",
    "Send",
    "TellRanks",
    "Tick",
]

# --- what happens --------------------------------------------------------------------------------------------------------------------------


@frozen
class Connected:
    """There is a connection to a node. `joining`: it is no member and wants to become one."""

    node: int
    joining: bool = False


@frozen
class Closed:
    """The connection to a node is closed and another one was refused: its agent, and with it the node, is dead."""

    node: int
    reason: str = "its agent is gone"


@frozen
class Heard:
    """A message of another agent."""

    node: int
    message: Message


@frozen
class Hosted:
    """A store listens for the proposal of that generation."""

    generation: int
    host: str
    port: int


@frozen
class RankReported:
    """A rank of this node stands still in a generation."""

    rank: int
    generation: int
    facts: Mapping[str, Any]


@frozen
class RankDone:
    """A rank of this node has finished well."""

    rank: int


@frozen
class RankBeat:
    """A rank of this node lives."""

    rank: int


@frozen
class RankEnded:
    """A rank of this node is gone, or has failed. `fatal`: the whole run ends with what it said."""

    rank: int
    reason: str
    fatal: bool = False


@frozen
class Leave:
    """This node is asked to leave at the next boundary."""


@frozen
class Tick:
    """Time has passed. To come at least every `silence / BEATS`."""


Event = Connected | Closed | Heard | Hosted | RankReported | RankDone | RankBeat | RankEnded | Leave | Tick


# --- what to do -----------------------------------------------------------------------------------------------------------------------------


@frozen
class Send:
    """A message to another agent; kept until there is a connection."""

    node: int
    message: Message


@frozen
class TellRanks:
    """A message to ranks of this node, all of them if none is named."""

    message: Message
    ranks: tuple[int, ...] = ()


@frozen
class Host:
    """Open a store for a proposal and answer with `Hosted`."""

    generation: int


@frozen
class End:
    """End all ranks of this node and its agent. `said` is the last word to the others. Status 0: as it should be."""

    reason: str
    said: Message
    status: int = 1


@frozen
class Note:
    """An event for the launcher."""

    event: Message


Action = Send | TellRanks | Host | End | Note
