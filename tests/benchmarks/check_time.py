"""Cold start of `pdsl check --no-model` on a 50-line spec, against importing torch, interleaved. Target: below 150 ms and below 0.15 of the import.

.venv/bin/python tests/benchmarks/check_time.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """\
pdsl 1
param layers: int = 8
param width: int = 256
let half = layers / 2

cluster {
  nodes          = 2
  ranks_per_node = 8
  device         = cpu
}

mesh {
  axis dp   = 2
  axis pp   = 2
  axis fsdp = 2
  axis tp   = 2
}

model "pdsl.models:gpt" {
  layers  = layers
  width   = width
  heads   = 8
  context = 128
}

shard {
  "tok_embeddings.weight"         => fsdp(fsdp)
  "layers.*.attn.w{q,k,v}.weight" => colwise(tp) + fsdp(fsdp)
  "layers.*.attn.wo.weight"       => rowwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w1.weight"        => colwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w2.weight"        => rowwise(tp) + fsdp(fsdp)
  "**"                            => fsdp(fsdp)
}

pipeline over pp {
  stages   = balanced
  schedule = one_f_one_b(microbatches = 8)
}

train {
  data      = source("pdsl.data:python_source", context = 128)
  batch     = 64
  steps     = 1000
  optimizer = adamw(lr = 3e-4, weight_decay = 0.1)
  rate      = cosine(warmup = 100, floor = 0.1)
  clip      = 1.0
  seed      = 17
}
assert half * 2 == layers, "an even number of layers"
profile small { train.batch = 32; train.steps = 10 }
"""


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return time.perf_counter() - begin


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.pdsl"
        path.write_text(SPEC)
        check = [sys.executable, "-m", "pdsl", "check", "--no-model", str(path)]
        torch = [sys.executable, "-c", "import torch"]
        nothing = [sys.executable, "-c", "pass"]
        for command in (check, torch):  # files into the page cache, tables into PDSL's
            seconds(command)
        times = [(seconds(check), seconds(torch), seconds(nothing)) for _ in range(rounds)]
    checks, torches, bare = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(c / t for c, t, _ in times)
    print(
        f"check {checks * 1000:.0f} ms (target 150), import torch {torches * 1000:.0f} ms, python {bare * 1000:.0f} ms: ratio {ratio:.3f} (target 0.15)"
    )
    return 0 if checks < 0.15 and ratio < 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
