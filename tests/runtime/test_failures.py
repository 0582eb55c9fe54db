"""What ends a run: ranks and launchers that die, models that raise, ports in use. One message, a bounded end, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tree import ROOT

MODEL = '''
import os, time
import torch
from torch import nn


class Late(nn.Module):
    """Misbehaves in one rank's forward, in the third step of training."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled() and self.linear.weight.device.type != "meta"
        if self.how and self.calls > 4 and "PDSL_TEST" in os.environ:
            if self.how == "raise":
                raise ValueError("the third step is unlucky")
            time.sleep(600)
        return self.linear(x)


def build(fail="", late=""):
    if fail == "raise":
        raise ValueError("no weights today")
    if fail == "exit" and "OMP_NUM_THREADS" in os.environ and os.environ.get("PDSL_TEST") == "exit":
        os._exit(3)
    return nn.Sequential(nn.Linear(8, 8), Late(late), nn.Linear(8, 8), nn.Linear(8, 8))


class Rows:
    def __init__(self, size=64, delay=0.0):
        self.size, self.delay = size, delay

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.delay)
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "target": torch.zeros(8)}
'''

SPEC = """pdsl 1
mesh {{ axis pp = 2 }}
cluster {{ device = cpu }}
model "net:build" {{ {model} }}
pipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}
train {{
  data = source("net:Rows", {data})
  batch = 4
  steps = {steps}
  optimizer = sgd(lr = 1e-2)
  objective = mse
}}
"""


def write(folder: Path, *, model: str = "", data: str = "size = 64", steps: int = 4000) -> None:
    (folder / "net.py").write_text(MODEL)
    (folder / "net.pdsl").write_text(SPEC.format(model=model, data=data, steps=steps))


class Running:
    """A `pdsl run` in a folder, ended with all it started whatever the test does."""

    def __init__(self, folder: Path, *options: str, test: str = "1") -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PDSL_TEST": test, "PDSL_CACHE": str(folder / "cache")}
        command = [sys.executable, "-m", "pdsl", "run", "net.pdsl", "--metrics", "metrics.jsonl", *options]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for_steps(self, count: int, deadline: float = 60.0) -> None:
        limit = time.monotonic() + deadline
        while len(self.metrics()) < count:
            assert time.monotonic() < limit, "no step in time"
            assert self.process.poll() is None, self.process.stderr.read() if self.process.stderr else ""
            time.sleep(0.02)

    def metrics(self) -> list[dict[str, object]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ranks(self) -> list[int]:
        """Ids of the processes that read rows in training: all but the launcher, which reads some to probe the model."""
        found = {int(line) for line in (self.folder / "pids").read_text().split()}
        return sorted(found - {self.process.pid})

    def end(self, deadline: float) -> tuple[int, str]:
        """Exit status and stderr without the progress lines."""
        _, errors = self.process.communicate(timeout=deadline)
        lines = [line for line in errors.splitlines() if not line.startswith("step ")]
        return self.process.returncode, "\n".join(lines)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Running]]:
    started: list[Running] = []

    class Started(Running):
        def __init__(self, *options: str, test: str = "1") -> None:
            super().__init__(tmp_path, *options, test=test)
            started.append(self)

    yield Started
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(pids: list[int], deadline: float = 10.0) -> bool:
    limit = time.monotonic() + deadline
    while any(alive(p) for p in pids) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(alive(p) for p in pids)


def test_a_killed_rank_ends_the_run_with_one_message(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path)
    run = start()
    run.wait_for_steps(3)
    ranks = run.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    status, told = run.end(20)
    assert time.monotonic() - killed < 6
    assert status == 1
    assert told == "pdsl: rank 1 failed: its process was ended by SIGKILL"
    assert all_end(ranks)
    assert len(run.metrics()) >= 3  # what was done is on disk


def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path)
    run = start()
    run.wait_for_steps(2)
    ranks = run.ranks()
    run.process.kill()
    assert all_end(ranks)


def test_an_interrupt_ends_every_rank_quietly(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path)
    run = start()
    run.wait_for_steps(2)
    ranks = run.ranks()
    os.killpg(run.process.pid, signal.SIGINT)
    status, told = run.end(20)
    assert status == 130
    assert told == "pdsl: interrupted"
    assert all_end(ranks)


def test_a_forward_that_raises_names_the_place_once(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, model='late = "raise"')
    status, told = start().end(60)
    assert status == 1
    assert told.startswith("pdsl: rank ")
    assert "ValueError: the third step is unlucky" in told
    assert len(told.splitlines()) == 1


def test_a_rank_that_hangs_ends_the_run_after_the_silence_of_the_spec(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, model='late = "sleep"')
    with (tmp_path / "net.pdsl").open("a") as file:
        file.write("fault_budget { silence = 3s }\n")
    run = start()
    run.wait_for_steps(1)
    status, told = run.end(30)
    assert status == 1
    assert "no answer within 3 s, from a process that is still there" in told
    assert "microbatch" in told
    assert "which needs rank" in told
    assert len(told.splitlines()) == 1
    assert all_end(run.ranks())


def test_a_rank_that_ends_at_start_is_named(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, model='fail = "exit"')
    warm = subprocess.run(
        [sys.executable, "-m", "pdsl", "check", "net.pdsl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PDSL_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert warm.returncode == 0, warm.stdout
    status, told = start(test="exit").end(60)
    assert status == 1
    assert "its process ended with status 3 and said nothing" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "factory", "words"),
    [
        ('fail = "raise"', "net:build", "net:build raised ValueError: no weights today (net.py:26)"),
        ("", "net:biuld", "net has no biuld; did you mean build"),
        ("", "nett:build", "there is no module nett"),
    ],
    ids=["a factory that raises", "a factory that is missing", "a module that is missing"],
)
def test_a_bad_factory_is_told_before_any_process_starts(
    tmp_path: Path, start: type[Running], model: str, factory: str, words: str
) -> None:
    write(tmp_path, model=model)
    spec = tmp_path / "net.pdsl"
    spec.write_text(spec.read_text().replace('"net:build"', f'"{factory}"'))
    status, told = start().end(60)
    assert status == 1
    assert "error[PDL108]" in told
    assert words in told
    assert "Traceback" not in told


def test_data_smaller_than_a_batch_is_told(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, data="size = 3")
    status, told = start().end(60)
    assert status == 1
    first, *_, last = told.splitlines()
    assert first == "error[PDL805]: the data has 3 samples, fewer than one batch of 4, and what is not full is dropped"
    assert last == "1 error in 1 file"
    assert told.count("error[") == 1


def test_a_port_in_use_is_told(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        status, told = start("--port", str(port)).end(60)
    assert status == 1
    assert f"port {port} cannot be used: Address already in use; leave the port out and a free one is taken" in told
    assert len(told.splitlines()) == 1


def test_metrics_that_cannot_be_written_are_told(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    status, told = start().end(60)
    assert status == 1
    assert "metrics cannot be written to metrics.jsonl: Is a directory" in told


def test_metrics_hold_one_object_a_step(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, steps=5)
    run = start()
    status, told = run.end(60)
    assert (status, told) == (0, "")
    found = run.metrics()
    assert [m["step"] for m in found] == [0, 1, 2, 3, 4]
    assert {frozenset(m) for m in found} == {frozenset({"step", "loss", "grad_norm", "samples", "seconds", "generation", "digest"})}
    assert len({m["digest"] for m in found}) == 5


def test_torchrun_gives_the_same_losses(tmp_path: Path, start: type[Running]) -> None:
    write(tmp_path, steps=3)
    local = start()
    assert local.end(60) == (0, "")
    expected = local.metrics()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PDSL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "pdsl",
            "run",
            "net.pdsl",
            "--metrics",
            "other.jsonl",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "other.jsonl").read_text().splitlines()]
    assert [m["digest"] for m in found] == [m["digest"] for m in expected]
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected], rel=1e-6)


def test_a_failure_under_torchrun_is_told_by_one_rank(tmp_path: Path) -> None:
    write(tmp_path, model='late = "raise"')
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pdsl", "run", "net.pdsl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PDSL_CACHE": str(tmp_path / "cache"), "PDSL_TEST": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("pdsl: ")]
    assert told == ["pdsl: rank 0 failed: ValueError: the third step is unlucky"]


def test_another_number_of_processes_than_the_plan_needs_is_told(tmp_path: Path) -> None:
    write(tmp_path)
    joined = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # as torchrun sets them
    done = subprocess.run(
        [sys.executable, "-m", "pdsl", "run", "net.pdsl"],
        cwd=tmp_path,
        env={**os.environ, **joined, "PYTHONPATH": str(ROOT), "PDSL_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "pdsl: torchrun started 3 processes, the plan needs 2\n"
