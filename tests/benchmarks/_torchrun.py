"""Plain data-parallel training under torchrun that saves a checkpoint after every step: the worker of the recovery benchmark.

    torchrun --nnodes 1 --nproc-per-node 4 --max-restarts K _torchrun.py FOLDER

The first rank appends a line with step, restarts so far and time to FOLDER/steps; every rank leaves its process id in FOLDER/pid-RANK.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _recovery import BATCH, CONTEXT, MODEL, RATE, SEED
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pdsl.data import python_source
from pdsl.models import gpt


def main() -> None:
    folder = Path(sys.argv[1])
    rank, size, restarts = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # each start meets at a place of its own: in that of the last one ranks may find the addresses of the dead
    dist.init_process_group("gloo", store=dist.PrefixStore(f"restart{restarts}", store), rank=rank, world_size=size)
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(SEED)
    bare = gpt(**MODEL)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=RATE)
    step, saved = 0, folder / "state.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data, share = python_source(context=CONTEXT), BATCH // size
    with (folder / "steps").open("a") as told:
        while True:
            first = step * BATCH + rank * share
            rows = data.rows([i % len(data) for i in range(first, first + share)])
            loss = F.cross_entropy(model(rows["tokens"]).flatten(0, 1), rows["targets"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
                told.write(f"{step} {restarts} {time.monotonic()}\n")
                told.flush()


if __name__ == "__main__":
    main()
