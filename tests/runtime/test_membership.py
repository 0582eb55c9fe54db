"""The agents' state machine: every order of events in small clusters, and random weather in larger ones. Nobody waits for ever, nobody splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from pdsl.runtime.happenings import Closed, Connected, End, Heard, Leave, RankBeat, RankEnded, RankReported, Send, TellRanks, Tick
from pdsl.runtime.membership import Membership
from pdsl.runtime.votes import majority, side_that_stays
from tests.runtime.cluster_model import CLOSED, World, cluster, hosted, join, running, settled, told

# --- votes


def test_majority_is_more_than_half_or_half_with_the_lowest():
    five = frozenset(range(5))
    assert majority(frozenset({0, 1, 4}), five)
    assert not majority(frozenset({0, 1}), five)
    assert majority(frozenset({0, 3}), frozenset({0, 1, 2, 3}))
    assert not majority(frozenset({1, 2}), frozenset({0, 1, 2, 3}))
    assert not majority(frozenset(), frozenset())


def test_of_two_disjoint_sides_never_both_are_a_majority():
    for count in range(1, 9):
        base = frozenset(range(count))
        for bits in range(2**count):
            side = frozenset(n for n in base if bits >> n & 1)
            assert not (majority(side, base) and majority(base - side, base))


def test_whom_most_suspect_goes_first_and_of_two_the_higher_number():
    assert side_that_stays(frozenset(range(4)), [(0, 2), (1, 2), (2, 3)]) == {0, 1, 3}
    assert side_that_stays(frozenset(range(4)), [(1, 3)]) == {0, 1, 2}
    assert side_that_stays(frozenset(range(5)), [(a, b) for a in (0, 1, 2) for b in (3, 4)]) == {0, 1, 2}
    assert side_that_stays(frozenset(range(4)), [(a, b) for a in (0, 3) for b in (1, 2)]) == {0, 3}
    assert side_that_stays(frozenset(range(3)), []) == {0, 1, 2}


# --- every order of events


def explore(start: World, kills: int, check: Callable[[World], None]) -> tuple[int, list[World]]:
    """All states that can be reached with up to `kills` nodes killed at any moment: how many, and those in which nothing happens any more."""
    seen, stack, ends = set(), [start], []
    while stack:
        world = stack.pop()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        check(world)
        moves = list(world.moves())
        if not moves:
            ends.append(world)
        if world.kills < kills:
            moves += [("kill", node, node) for node in world.living()]
        stack += [world.after(move) for move in moves]
    return len(seen), ends


def decided_once(world: World) -> None:
    """No generation is decided in two ways, and whoever has decided later goes on with fewer nodes (nobody joins here)."""
    by_generation: dict[int, Any] = {}
    for seat in world.seats:
        for decision in seat.rank.decisions:
            assert by_generation.setdefault(decision[0], decision) == decision
    in_order = [frozenset(by_generation[g][1]) for g in sorted(by_generation)]
    assert all(later <= earlier for earlier, later in pairwise(in_order))


def all_go_on(world: World) -> None:
    """Everybody who lives has taken the same last decision, and it has exactly those who live."""
    living = world.living()
    last = {world.seats[node].rank.decisions[-1] for node in living}
    assert len(last) <= 1
    assert all(frozenset(decision[1]) == living for decision in last)
    assert all(not world.seats[node].rank.owes for node in living)


@pytest.mark.parametrize(("nodes", "kills", "states"), [(2, 1, 5), (3, 1, 100), (3, 2, 400), (4, 1, 5000)])
def test_the_living_go_on_together_in_every_order_of_losses_and_messages(nodes, kills, states, capsys):
    count, ends = explore(running(nodes), kills, decided_once)
    assert count > states
    assert any(len(end.living()) == nodes - kills for end in ends)
    for end in ends:
        all_go_on(end)


def test_a_start_survives_a_loss_in_every_moment():
    _, ends = explore(cluster(3), 1, decided_once)
    assert {len(end.living()) for end in ends} == {2, 3}
    for end in ends:
        all_go_on(end)


def test_two_nodes_lost_in_random_orders_of_four():
    for seed in range(150):
        rng = random.Random(seed)
        world, kills = running(4), 0
        while True:
            moves = list(world.moves())
            if kills < 3 and (not moves or rng.random() < 0.08):
                kills += 1
                world = world.after(("kill", 0, rng.choice(sorted(world.living()))))
            elif moves:
                world = world.after(rng.choice(moves))
            else:
                break
            decided_once(world)
        assert len(world.living()) == 4 - kills
        all_go_on(world)


def test_a_node_joins_in_every_order_even_if_one_dies_meanwhile():
    def unique(world: World) -> None:
        seen: dict[int, Any] = {}
        for seat in world.seats:
            for decision in seat.rank.decisions:
                assert seen.setdefault(decision[0], decision) == decision

    _, ends = explore(join(running(2)), 1, unique)
    assert any(end.seats[2].alive and end.seats[2].rank.decisions for end in ends)
    for end in ends:
        all_go_on(end)


def test_a_node_leaves_in_every_order_even_if_one_dies_meanwhile():
    _, ends = explore(running(3).happen(0, Leave()), 1, decided_once)
    assert any(end.living() == {1, 2} and end.seats[0].end == "node 0 has left" for end in ends)
    for end in ends:
        all_go_on(end)
        assert 0 not in end.living()


def test_the_run_is_over_in_every_order_even_if_one_dies_meanwhile():
    start = running(3)
    start = evolve(start, seats=tuple(evolve(s, rank=evolve(s.rank, owes=True, finishes=True)) for s in start.seats))
    _, ends = explore(start, 1, decided_once)
    for end in ends:
        assert not end.living()
        survivors = [seat for seat in end.seats if seat.end == "the run is over"]
        assert len(survivors) >= 3 - end.kills
        assert all(seat.rank.over for seat in survivors)


def test_ranks_that_were_done_are_woken_when_another_needs_them():
    start = running(3)
    seats = [evolve(s, rank=evolve(s.rank, owes=True, finishes=True)) for s in start.seats[:2]]
    _, ends = explore(evolve(start, seats=(*seats, start.seats[2])), 1, decided_once)
    lost = [end for end in ends if end.kills and 2 in end.living()]
    assert lost
    for end in lost:
        all_go_on(end)


def test_reports_are_the_same_everywhere_and_have_every_living_rank():
    world = settled(running(3).kill(1))
    reports = {world.seats[node].rank.decisions[-1][4] for node in world.living()}
    assert len(reports) == 1
    assert [rank for rank, _ in reports.pop()] == ["0", "2"]


# --- silence


class Weather:
    """Machines in time, over links that may be cut for a while, with processes that may stand still for a while. Moments are steps of 0.05 s."""

    STEP = 0.05

    def __init__(self, nodes: int, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.machines = [running(nodes).machine(node) for node in range(nodes)]
        self.ranks = [running(nodes).seats[node].rank for node in range(nodes)]
        self.wires: dict[tuple[int, int], list[Any]] = {(a, b): [] for a in range(nodes) for b in range(nodes) if a != b}
        self.dead: set[int] = set()
        self.paused: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.ends: dict[int, str] = {}

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / self.STEP)):
            self.now += self.STEP
            nodes = list(range(len(self.machines)))
            self.rng.shuffle(nodes)
            for node in nodes:
                self._live(node)

    def kill(self, node: int) -> None:
        self.dead.add(node)
        for other in range(len(self.machines)):
            if other != node:
                self.wires[node, other].append(CLOSED)

    def split(self, side: set[int]) -> None:
        self.cut |= {frozenset({a, b}) for a in side for b in set(range(len(self.machines))) - side}

    def running(self) -> frozenset[int]:
        return frozenset(range(len(self.machines))) - self.dead

    def _live(self, node: int) -> None:
        if node in self.dead | self.paused:
            return
        tick_first = self.rng.random() < 0.3
        if tick_first:
            self._happen(node, Tick())
        sources = [source for source, target in self.wires if target == node and frozenset({source, node}) not in self.cut]
        self.rng.shuffle(sources)
        for source in sources:
            queue = self.wires[source, node]
            count = len(queue) if self.rng.random() < 0.8 else self.rng.randint(0, len(queue))
            arrived, queue[:] = queue[:count], queue[count:]
            for message in arrived:
                self._arrive(source, node, message)
        rank = self.ranks[node]
        if rank.owes and node not in self.dead and self.rng.random() < 0.5:
            self.ranks[node] = evolve(rank, owes=False, waits=True)
            self._happen(node, RankReported(node, rank.generation, {}))
        self._happen(node, RankBeat(node))
        if not tick_first:
            self._happen(node, Tick())

    def _arrive(self, source: int, node: int, message: Any) -> None:
        if node in self.dead:
            return
        reason = self.machines[node].knows_out(source)
        if reason is None:
            self._happen(node, Closed(source) if message == CLOSED else Heard(source, message))
        elif source not in self.dead and message != CLOSED:
            self.wires[node, source].append({"kind": "out", "reason": reason})

    def _happen(self, node: int, event: Any) -> None:
        if node in self.dead:
            return
        for action in _performed(self.machines[node], event, self.now):
            self.ranks[node] = told(self.ranks[node], (action,))
            if isinstance(action, Send) and action.node not in self.dead:
                self.wires[node, action.node].append(action.message)
            elif isinstance(action, End):
                self.ends[node] = action.reason
                for other in range(len(self.machines)):
                    if other != node:
                        self.wires[node, other].append(action.said)
                self.kill(node)

    def decisions(self) -> dict[int, frozenset[int]]:
        """What was decided, by generation; nobody has decided differently."""
        found: dict[int, Any] = {}
        for rank in self.ranks:
            for decision in rank.decisions:
                assert found.setdefault(decision[0], decision) == decision
        return {generation: frozenset(decision[1]) for generation, decision in sorted(found.items())}

    def check(self) -> None:
        chain = list(self.decisions().values())
        assert all(later <= earlier for earlier, later in pairwise(chain)), "two sides went on"


def _performed(machine: Membership, event: Any, now: float) -> Iterator[Any]:
    events = [event]
    while events:
        for action in machine.handle(events.pop(0), now):
            if (answer := hosted(action)) is not None:
                events.append(answer)
            yield action


def test_a_node_that_stands_still_is_lost_after_silence_and_ends_itself_when_it_wakes():
    weather = Weather(3, random.Random(0))
    weather.pass_time(1.0)
    weather.paused.add(0)
    weather.pass_time(1.0)
    assert len(weather.decisions()) == 1, "lost before the silence was over"
    weather.pass_time(1.0)
    assert list(weather.decisions().values())[-1] == {1, 2}
    weather.paused.clear()
    weather.pass_time(0.3)
    assert "declared lost" in weather.ends[0]
    assert weather.running() == {1, 2}
    weather.check()


def test_a_pause_shorter_than_silence_costs_nobody():
    weather = Weather(3, random.Random(0))
    for node in (0, 1, 2):
        weather.paused.add(node)
        weather.pass_time(0.8)
        weather.paused.clear()
        weather.pass_time(1.0)
    assert weather.running() == {0, 1, 2}
    assert len(weather.decisions()) == 1


def test_all_stand_still_and_wake_as_if_nothing_had_been():
    weather = Weather(3, random.Random(0))
    weather.pass_time(1.0)
    weather.now += 1000.0
    weather.pass_time(3.0)
    assert weather.running() == {0, 1, 2}


@pytest.mark.parametrize("side", [{3, 4}, {0, 1}, {0, 4}, {2}])
def test_the_minority_of_a_split_network_ends_itself_and_the_majority_goes_on(side):
    weather = Weather(5, random.Random(1))
    weather.pass_time(0.5)
    weather.split(side)
    weather.pass_time(4.0)
    assert weather.running() == set(range(5)) - side
    assert all("no majority" in weather.ends[node] for node in side)
    assert list(weather.decisions().values())[-1] == set(range(5)) - side


def test_one_broken_link_costs_one_node():
    weather = Weather(5, random.Random(1))
    weather.cut.add(frozenset({1, 3}))
    weather.pass_time(4.0)
    assert weather.running() == {0, 1, 2, 4}


def test_half_of_the_nodes_goes_on_only_with_the_lowest():
    weather = Weather(4, random.Random(1))
    weather.split({0, 3})
    weather.pass_time(4.0)
    assert weather.running() == {0, 3}


def test_nobody_splits_in_any_weather():
    """Partitions, single broken links, processes that stand still, kills, all at random moments, healed or not."""
    decided = 0
    for seed in range(60):
        rng = random.Random(seed)
        weather = Weather(rng.randint(3, 5), rng)
        nodes = range(len(weather.machines))
        for _ in range(rng.randint(1, 4)):
            match rng.choice(["split", "link", "pause", "kill"]):
                case "split":
                    weather.split({n for n in nodes if rng.random() < 0.5})
                case "link":
                    weather.cut.add(frozenset(rng.sample(list(nodes), 2)))
                case "pause":
                    weather.paused.add(rng.choice(nodes))
                case "kill":
                    weather.kill(rng.choice(nodes))
            weather.pass_time(rng.choice([0.1, 0.5, 1.0, 1.15, 1.25, 1.4, 2.5]))
            if rng.random() < 0.4:
                weather.cut.clear()
            if rng.random() < 0.4:
                weather.paused.clear()
            weather.check()
        weather.cut.clear()
        weather.paused.clear()
        weather.pass_time(5.0)
        weather.check()
        decided += len(weather.decisions()) - 1
        left = weather.running()
        assert not left or left <= list(weather.decisions().values())[-1]
        assert all(weather.machines[node].alive == left for node in left), f"seed {seed}: not settled"
    assert decided > 30


# --- ranks of the own node


def machine(nodes: int = 3, node: int = 0, ranks: int = 2, silence: float = 1.0) -> Membership:
    found = Membership(node, frozenset(range(node * ranks, (node + 1) * ranks)), frozenset(range(nodes)), silence)
    for other in set(range(nodes)) - {node}:
        found.handle(Connected(other), 0.0)
    return found


def test_a_rank_that_gives_no_sign_of_life_ends_its_node():
    agent = machine(nodes=1)
    moment = 0.0
    while moment < 1.5:
        moment += 0.1
        agent.handle(RankBeat(0), moment)
        ends = [a for a in agent.handle(Tick(), moment) if isinstance(a, End)]
        if ends:
            break
    assert 1.0 < moment < 1.3
    assert ends[0].reason == "rank 1 of node 0 gave no sign of life for 1 s"


def test_a_rank_that_does_not_stand_still_after_a_loss_ends_its_node():
    world = running(3)
    agent = world.machine(0)
    agent.handle(Closed(2), 0.0)
    moment, ends = 0.0, []
    while moment < 1.5 and not ends:
        moment += 0.1
        agent.handle(RankBeat(0), moment)
        agent.handle(
            Heard(1, {"kind": "beat", "generation": 0, "members": [0, 1, 2], "suspects": [], "leaving": False, "joining": False}), moment
        )
        ends = [a for a in agent.handle(Tick(), moment) if isinstance(a, End)]
    assert 1.0 < moment < 1.3
    assert ends[0].reason == "rank 0 of node 0 did not stand still within 1 s of a loss"


def test_a_loss_is_told_to_ranks_and_to_the_others_at_once():
    actions = machine().handle(Closed(2), 0.0)
    assert TellRanks({"kind": "lost", "nodes": [2]}) in actions
    assert Send(1, {"kind": "lost", "nodes": {"2": "its agent is gone"}, "proven": True}) in actions


def test_a_fatal_error_of_a_rank_ends_everybody():
    actions = machine().handle(RankEnded(1, "ValueError: no", fatal=True), 0.0)
    assert Send(1, {"kind": "fatal", "rank": 1, "reason": "ValueError: no"}) in actions
    assert Send(2, {"kind": "fatal", "rank": 1, "reason": "ValueError: no"}) in actions
    assert any(isinstance(a, End) and a.status == 1 for a in actions)


def test_nothing_is_heard_of_a_node_that_is_out():
    agent = machine()
    agent.handle(Closed(2), 0.0)
    assert agent.handle(Heard(2, {"kind": "fatal", "rank": 4}), 0.1) == ()
    assert not agent.ended


@pytest.mark.parametrize(
    ("asked", "reason", "end"),
    [
        (True, "it left", ("node 2 has left", 0)),
        (True, "it was silent", ("node 2 was declared lost by node 1: it was silent", 1)),
        (False, "it left", ("node 2 was declared lost by node 1: it left", 1)),
    ],
)
def test_a_node_that_leaves_hears_it_first_from_one_that_is_no_leader(asked, reason, end):
    agent = machine(node=2)
    if asked:
        agent.handle(Leave(), 0.0)
    ends = [a for a in agent.handle(Heard(1, {"kind": "out", "reason": reason}), 0.1) if isinstance(a, End)]
    assert [(a.reason, a.status) for a in ends] == [end]


def test_nothing_is_heard_of_strangers():
    agent = machine()
    assert agent.handle(Heard(7, {"kind": "fatal", "rank": 14}), 0.1) == ()
    assert not agent.ended


def test_a_joiner_without_members_gives_up():
    agent = Membership(5, frozenset({5}), frozenset({0}), 1.0, joining=True)
    actions = agent.handle(Closed(0), 0.0)
    assert any(isinstance(a, End) for a in actions)
