"""Checkpoints: whole or not there, read under any plan by the same transition, and never the end of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from pdsl.lowering.holdings import STORAGE, Holding, demand, plan_holdings, state_tensors, without
from pdsl.lowering.transition import StateLost, transition
from pdsl.lowering.transition_check import check_transition
from pdsl.runtime.checkpoint import MARKER, CheckpointDamaged, folder_of, keep, latest
from pdsl.runtime.digest import digest
from pdsl.runtime.saving import commit, save, share_of
from tests.moving import apply, part, placed
from tests.plans import facts, heterogeneous, rectangular

ADAM = ("weight", "exp_avg", "exp_avg_sq", "step")
PLAN = rectangular(replicas=2, positions=2, shard=2)


def wholes_of(plan, kinds=ADAM, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator) if t.shape else torch.tensor(float(seed + 3)) for t in state_tensors(plan, kinds)
    }


def states_of(plan, wholes, kinds=ADAM):
    found = {rank: {} for rank in plan.ranks}
    for h in plan_holdings(plan, 0, kinds):
        found[h.owner][h.tensor] = part(wholes[h.tensor], h.box)
    return found


def saved(directory, step, plan=PLAN, wholes=None, metadata=None, kinds=ADAM):
    wholes = wholes if wholes is not None else wholes_of(plan, kinds)
    for rank, state in states_of(plan, wholes, kinds).items():
        handle = save(directory, step, plan, rank, state, asynchronous=False)
        assert handle.wait(60), handle.error
    assert commit(directory, step, metadata or {"position": step * 16}) == ""
    return wholes


def test_what_was_saved_is_read_back_to_the_bit(tmp_path):
    wholes = saved(tmp_path, 120, metadata={"position": 1920, "epoch": 1})
    found = latest(tmp_path)
    assert (found.step, found.plan, found.metadata) == (120, PLAN.hash, {"position": 1920, "epoch": 1})
    assert {t.name: t.shape for t in found.tensors} == {t.name: t.shape for t in state_tensors(PLAN, ADAM)}
    assert set(found.kinds["head.weight"]) == set(ADAM)
    for t in found.tensors:
        box = tuple((0, n) for n in t.shape)
        assert torch.equal(found.read(t.name, box), wholes[t.name])
        assert found.digests[t.name] == digest(wholes[t.name], box, t.shape)
        inner = tuple((n // 3, n - n // 3) for n in t.shape)
        assert torch.equal(found.read(t.name, inner), part(wholes[t.name], inner))
    assert found.damages() == ()


def test_copies_are_written_once_and_shared_out(tmp_path):
    saved(tmp_path, 1)
    found = latest(tmp_path)
    rows = {(h.tensor, h.box) for h in found.holdings()}
    assert len(rows) == len(found.boxes)
    assert rows == {(h.tensor, h.box) for h in plan_holdings(PLAN, 0, ADAM)}
    assert {h.version for h in found.holdings()} == {1}
    elements = {r: sum(torch.zeros([b - a for a, b in n.box]).numel() for n in share_of(PLAN, r)) for r in PLAN.ranks}
    total = sum(p.numel for p in PLAN.facts.parameters)
    assert sum(elements.values()) == total
    assert max(elements.values()) < 0.6 * total / 2  # two pipelines: without sharing out, four ranks would write all


OTHERS = {
    "one rank": rectangular(positions=1, shard=1),
    "three stages": rectangular(positions=3, shard=1),
    "fsdp3": rectangular(positions=1, shard=3),
    "tp2 fsdp2": rectangular(positions=2, shard=2, tensor=2),
    "unequal": heterogeneous(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("before", ["dp2 pp2 fsdp2", "tp2 fsdp2"])
def test_a_checkpoint_loads_under_another_plan_as_the_live_transition_would(tmp_path, before, other):
    a, b = OTHERS.get(before, PLAN), OTHERS[other]
    wholes = saved(tmp_path, 7, a)
    stored = latest(tmp_path)
    needs, tensors = demand(b, ADAM), state_tensors(b, ADAM)
    rows = stored.holdings()
    from_disk = transition(rows, needs, tensors, node_of=lambda r: r // 2)
    assert check_transition(from_disk, rows, needs) == ()
    assert (from_disk.rounds, from_disk.version) == ((), 7)
    read = {(h.owner, h.tensor): [] for h in rows}
    for h in rows:
        read[h.owner, h.tensor].append((h.box, stored.read(h.tensor, h.box)))
    loaded = apply(from_disk, read, needs)
    live_rows = plan_holdings(a, 7, ADAM)
    live = apply(transition(live_rows, needs, tensors, node_of=lambda r: r // 2), placed(wholes, live_rows), needs)
    assert loaded.keys() == live.keys()
    for key, [(box, values)] in live.items():
        assert loaded[key][0][0] == box
        assert torch.equal(loaded[key][0][1], values)


def test_live_ranks_and_a_checkpoint_of_the_same_step_make_up_for_each_other(tmp_path):
    plan = rectangular(positions=2, shard=2)
    saved(tmp_path, 5, plan)
    needs, tensors = demand(plan, ADAM), state_tensors(plan, ADAM)
    left = without(plan_holdings(plan, 5, ADAM), {3})
    with pytest.raises(StateLost):
        transition(left, needs, tensors, node_of=plan.node)
    found = transition((*left, *latest(tmp_path).holdings()), needs, tensors, node_of=plan.node)
    assert {m.target for m in found.reads} == {3}
    assert found.version == 5
    older = transition((*without(plan_holdings(plan, 9, ADAM), {3}), *latest(tmp_path).holdings()), needs, tensors, node_of=plan.node)
    assert older.version == 5  # what is left of step 9 is of no use: all goes back
    assert {m.target for m in older.reads} == {0, 1, 2, 3}


def test_states_that_do_not_exist_yet_are_absent_and_not_zero(tmp_path):
    kinds = {"head.weight": ADAM}
    saved(tmp_path, 2, wholes=wholes_of(PLAN, kinds), kinds=kinds)
    found = latest(tmp_path)
    assert set(found.kinds["head.weight"]) == set(ADAM)
    assert found.kinds["embed.weight"] == ("weight",)
    with pytest.raises(KeyError):
        found.read("exp_avg/embed.weight", ((0, 1), (0, 1)))


def test_a_tied_weight_is_written_once(tmp_path):
    plan = rectangular(positions=2, shard=1, model=facts(4, tied=True))
    saved(tmp_path, 2, plan)
    assert [h.box for h in latest(tmp_path).holdings() if h.tensor == "weight/embed.weight"] == [((0, 20), (0, 8))]


def test_buffers_are_kept_as_the_lowest_rank_has_them(tmp_path):
    plan = rectangular(positions=2, shard=1)
    wholes = wholes_of(plan)
    for rank, state in states_of(plan, wholes).items():
        save(tmp_path, 3, plan, rank, {**state, "buffer/count": torch.tensor([rank, rank + 1])}, asynchronous=False)
    assert commit(tmp_path, 3, {}) == ""
    assert latest(tmp_path).read("buffer/count", ((0, 2),)).tolist() == [0, 1]


def test_an_asynchronous_save_keeps_what_was_there_when_it_was_asked_for(tmp_path):
    plan = rectangular(positions=1, shard=1)
    wholes = wholes_of(plan)
    state = {name: t.clone() for name, t in states_of(plan, wholes)[0].items()}
    handle = save(tmp_path, 4, plan, 0, state, asynchronous=True)
    for t in state.values():
        t.fill_(-1.0)
    assert handle.wait(60), handle.error
    assert handle.bytes == sum(t.numel() * t.element_size() for t in state.values())
    assert commit(tmp_path, 4, {}) == ""
    assert torch.equal(latest(tmp_path).read("weight/head.weight", ((0, 20), (0, 8))), wholes["weight/head.weight"])


# --- what goes wrong ----------------------------------------------------------------------------------------------------------------------


def test_without_the_marker_there_is_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    saved(tmp_path, 1)
    for rank, state in states_of(PLAN, wholes_of(PLAN)).items():
        save(tmp_path, 2, PLAN, rank, state, asynchronous=False)
    assert latest(tmp_path).step == 1
    assert commit(tmp_path, 2, {}) == ""
    assert latest(tmp_path).step == 2
    assert latest(tmp_path, before=2).step == 1
    assert latest(tmp_path, before=1) is None


def test_a_share_that_is_missing_is_named_and_nothing_is_committed(tmp_path):
    wholes = wholes_of(PLAN)
    for rank, state in states_of(PLAN, wholes).items():
        if rank not in (2, 5):
            save(tmp_path, 1, PLAN, rank, state, asynchronous=False)
    assert commit(tmp_path, 1, {}) == "step 1 is not whole: no share of rank 2, 5"
    assert commit(tmp_path, 9, {}) == "no rank has saved step 9"
    assert latest(tmp_path) is None


def test_shares_of_another_plan_do_not_count(tmp_path):
    wholes = wholes_of(PLAN)
    other = rectangular(positions=1, shard=1)
    save(tmp_path, 1, other, 0, states_of(other, wholes)[0], asynchronous=False)
    for rank, state in states_of(PLAN, wholes).items():
        if rank:
            save(tmp_path, 1, PLAN, rank, state, asynchronous=False)
    assert commit(tmp_path, 1, {}) == "step 1 is not whole: no share of rank 0"
    save(tmp_path, 1, PLAN, 0, states_of(PLAN, wholes)[0], asynchronous=False)
    assert commit(tmp_path, 1, {}) == ""


def test_ranks_that_disagree_about_a_counter_make_no_checkpoint(tmp_path):
    plan = rectangular(positions=1, shard=2)
    wholes = wholes_of(plan)
    for rank, state in states_of(plan, wholes).items():
        counted = {n: t + rank if n == "step/head.weight" else t for n, t in state.items()}
        save(tmp_path, 1, plan, rank, counted, asynchronous=False)
    assert commit(tmp_path, 1, {}) == "rank-00000.pt and rank-00001.pt hold different values of step/head.weight"


def flipped(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "what", ["truncated share", "missing share", "torn marker", "edited marker", "marker of another step", "path in marker"]
)
def test_what_is_damaged_is_passed_over_for_the_one_before(tmp_path, what):
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    folder = folder_of(tmp_path, 2)
    share, marker = folder / "rank-00003.pt", folder / MARKER
    text = marker.read_text()
    if what == "truncated share":
        os.truncate(share, share.stat().st_size - 1)
    elif what == "missing share":
        share.unlink()
    elif what == "torn marker":
        marker.write_text(text[: len(text) // 2])
    elif what == "edited marker":
        marker.write_text(text.replace("32", "33", 1))
    elif what == "marker of another step":
        folder.rename(folder_of(tmp_path, 3))
    else:
        from pdsl.runtime.checkpoint import sealed, unsealed

        content = unsealed(marker)
        content["sizes"]["../step-00000001/rank-00003.pt"] = share.stat().st_size
        marker.write_text(sealed(content))
    assert latest(tmp_path).step == 1


def test_a_flipped_bit_is_found_when_it_is_read_and_when_all_is_verified(tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    found = latest(tmp_path)
    name = "weight/embed.weight"
    stored = next(b for b in found.boxes if b.tensor == name)
    share = folder_of(tmp_path, 2) / stored.file
    raw = share.read_bytes()
    flipped(share, raw.index(part(wholes_of(PLAN)[name], stored.box).contiguous().view(torch.uint8).numpy().tobytes()) + 5)
    fresh = latest(tmp_path)
    assert fresh.step == 2  # sizes are right
    with pytest.raises(CheckpointDamaged, match=rf"step-00000002/{stored.file}: weight/embed.weight \[.*\] is not what was written"):
        fresh.read(name, stored.box)
    assert len(fresh.damages()) == 1
    assert latest(tmp_path, verify=True).step == 1


def test_swapped_tensors_and_files_of_other_things_are_found(tmp_path):
    saved(tmp_path, 1)
    found = latest(tmp_path)
    stored = next(b for b in found.boxes if b.tensor == "exp_avg/head.weight")
    share = folder_of(tmp_path, 1) / stored.file
    content = torch.load(share, weights_only=True)
    content["exp_avg/head.weight"], content["exp_avg_sq/head.weight"] = content["exp_avg_sq/head.weight"], content["exp_avg/head.weight"]
    torch.save(content, share)
    assert any("its digest differs" in d for d in found.damages())
    torch.save([1, 2], share)
    assert "does not hold" in str(latest_error(folder_of(tmp_path, 1), found, stored))


def latest_error(folder, found, stored):
    fresh = type(found)(folder, found.step, found.plan, found.metadata, found.boxes, found.sizes)
    with pytest.raises(CheckpointDamaged) as caught:
        fresh.read(stored.tensor, stored.box)
    return caught.value


def test_nothing_is_unpickled(tmp_path):
    saved(tmp_path, 1)
    found = latest(tmp_path)
    stored = found.boxes[0]
    mark = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    torch.save({stored.tensor: Hostile()}, folder_of(tmp_path, 1) / stored.file)
    assert "cannot be read" in str(latest_error(folder_of(tmp_path, 1), found, stored))
    assert not mark.exists()


def test_a_box_that_is_not_there_is_refused(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match=r"weight/head.weight \[0:21, 0:8\] is not in the checkpoint of step 1"):
        latest(tmp_path).read("weight/head.weight", ((0, 21), (0, 8)))


def test_a_save_that_fails_says_so_and_raises_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    plan = rectangular(positions=1, shard=1)
    state = states_of(plan, wholes_of(plan))[0]
    handle = save(tmp_path / "file", 1, plan, 0, state)
    assert not handle.wait(60)
    assert handle.error.startswith("rank 0 could not save step 1: NotADirectoryError")
    assert "step 1 could not be committed" in commit(tmp_path / "file", 1, {}) or "no rank has saved" in commit(tmp_path / "file", 1, {})
    lacking = save(tmp_path, 1, plan, 0, {n: t for n, t in state.items() if n != "weight/head.weight"})
    assert "it lacks weight/head.weight" in lacking.error
    wrong = save(tmp_path, 1, plan, 0, {**state, "weight/head.weight": torch.zeros(3)})
    assert "weight/head.weight has sizes (3,), and its box is [0:20, 0:8]" in wrong.error
    assert commit(tmp_path, 1, {"what": object()}).startswith("no rank has saved")


def test_metadata_that_json_does_not_have_is_told(tmp_path):
    plan = rectangular(positions=1, shard=1)
    save(tmp_path, 1, plan, 0, states_of(plan, wholes_of(plan))[0], asynchronous=False)
    assert "TypeError" in commit(tmp_path, 1, {"what": object()})
    assert latest(tmp_path) is None


KILLED = """
import os, sys, torch
from pathlib import Path
from tests.runtime.test_checkpoint import PLAN, states_of, wholes_of
import pdsl.runtime.checkpoint as checkpoint
from pdsl.runtime import saving
at = int(sys.argv[2])
count = 0
def hook(event, args):
    global count
    if event in ("open", "os.rename", "os.remove") and sys.argv[1] in str(args[0]):
        count += 1
        if count == at:
            os._exit(9)
states = states_of(PLAN, wholes_of(PLAN, seed=1))
sys.addaudithook(hook)
for rank in PLAN.ranks:
    saving.save(sys.argv[1], 2, PLAN, rank, states[rank], asynchronous=False)
assert saving.commit(sys.argv[1], 2, {}) == ""
"""


@pytest.mark.parametrize("at", [1, 6, 54, 57, 10_000])
def test_a_process_killed_at_any_file_leaves_the_old_checkpoint_or_the_new_one(tmp_path, at):
    saved(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(at)],
        env={**os.environ, "PYTHONPATH": "."},
        timeout=100,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if at == 10_000 else 9), done.stderr
    found = latest(tmp_path, verify=True)
    assert found.step == (2 if at == 10_000 else 1)
    assert found.damages() == ()


def test_the_same_state_saved_again_leaves_the_checkpoint_alone_and_another_one_replaces_it(tmp_path):
    wholes = saved(tmp_path, 1)
    marker = folder_of(tmp_path, 1) / MARKER
    for rank, state in states_of(PLAN, wholes).items():
        assert save(tmp_path, 1, PLAN, rank, state, asynchronous=False).wait()
    assert marker.exists()
    changed = wholes_of(PLAN, seed=5)
    for rank, state in states_of(PLAN, changed).items():
        assert save(tmp_path, 1, PLAN, rank, state, asynchronous=False).wait()
    assert latest(tmp_path) is None
    assert commit(tmp_path, 1, {}) == ""
    assert torch.equal(latest(tmp_path, verify=True).read("weight/head.weight", ((0, 20), (0, 8))), changed["weight/head.weight"])


def test_the_newest_are_kept_and_leftovers_go(tmp_path):
    plan = rectangular(positions=1, shard=1)
    for step in (1, 2, 4, 5):
        saved(tmp_path, step, plan)
    for step in (3, 6):
        save(tmp_path, step, plan, 0, states_of(plan, wholes_of(plan))[0], asynchronous=False)
    (tmp_path / "notes").mkdir()
    assert keep(tmp_path, 2) == (1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000004", "step-00000005", "step-00000006"]
    assert latest(tmp_path).step == 5
    assert keep(tmp_path, 5) == ()
    assert keep(tmp_path / "nowhere", 1) == ()
    with pytest.raises(ValueError, match="at least one"):
        keep(tmp_path, 0)


def test_rows_can_be_given_another_storage(tmp_path):
    plan = rectangular(positions=1, shard=1)
    saved(tmp_path, 1, plan)
    found = latest(tmp_path)
    assert {h.owner for h in found.holdings()} == {STORAGE}
    assert Holding(-2, "weight/head.weight", ((0, 20), (0, 8)), 1) in found.holdings(-2)
    assert json.loads((folder_of(tmp_path, 1) / MARKER).read_text())["content"]["format"] == 1
