"""Cold start of `pdsl check --no-model` on a spec of 50 lines, against `python -c "import torch"`.

    python tests/benchmarks/check_start.py [--runs N] [--profile] [--json FILE]

Both are whole processes, started in turn, so that the ratio holds on a busy machine too. Targets: a median below 150 ms and a ratio below 0.15;
exit status 1 beyond the ratio, or if the check imports torch or reports anything. With `--profile`, the dearest imports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
SECONDS, RATIO = 0.150, 0.15

# what the console script does
CHECK = "import sys; from pdsl.__main__ import main; sys.exit(main())"

SPEC = """\
# Fifty lines, all blocks that can be checked today.
pdsl 1

param layers: int = 8
param width: int = 256
let half = layers / 2

cluster {
  nodes          = 2
  ranks_per_node = 8
  device         = cpu
}

mesh {                                        # outermost first
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

shard {                                       # first match wins
  "tok_embeddings.weight"         => [tp, _]
  "layers.*.attn.w{q,k,v}.weight" => colwise(tp) + fsdp(fsdp)
  "layers.*.attn.wo.weight"       => rowwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w1.weight"        => colwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w2.weight"        => rowwise(tp) + fsdp(fsdp)
  "**"                            => fsdp(fsdp)
}

pipeline over pp { schedule = one_f_one_b(microbatches = 8) }

train {
  data      = source("pdsl.data:python_source", context = 128)
  batch     = 64
  steps     = 1000
  optimizer = adamw(lr = 3e-4, weight_decay = 0.1)
  rate      = cosine(warmup = 100, floor = 0.1)
  clip      = 1.0
  seed      = 17
}

assert half * 2 == layers, "an even number of layers, please"
profile laptop { mesh.dp = 1; cluster.nodes = 1 }
"""


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of a process. Raises CalledProcessError, with what it said, if it fails."""
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    return time.perf_counter() - begin


def imports(command: list[str], environment: dict[str, str]) -> list[tuple[int, int, str]]:
    """Own and cumulated microseconds and the name of every import of a process, as -X importtime tells."""
    done = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    found = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \| ( *\S+)$", done.stderr, re.MULTILINE)
    return [(int(own), int(total), name.strip()) for own, total, name in found]


def main() -> int:
    parser = argparse.ArgumentParser(description="Cold start of `pdsl check --no-model` over that of `import torch`.")
    parser.add_argument("--runs", type=int, default=15, help="processes of each kind (default: 15)")
    parser.add_argument("--profile", action="store_true", help="list the dearest imports")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        return measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> int:
    spec = folder / "fifty.pdsl"
    spec.write_text(SPEC)
    assert len(SPEC.splitlines()) == 50, len(SPEC.splitlines())
    # a plain checkout will do; caches of PDSL are this run's own, so that the first check is cold and the others are as a user's are
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PDSL_CACHE": str(folder / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process would compile PDSL again, and torch not
    check = [sys.executable, "-c", CHECK, "check", "--no-model", str(spec)]
    commands = {"check": check, "torch": [sys.executable, "-c", "import torch"], "python": [sys.executable, "-c", ""]}
    try:
        first = seconds(check, environment)
        names = imports(check, environment)
    except subprocess.CalledProcessError as error:
        print(f"the check failed with status {error.returncode}:\n{error.stdout}{error.stderr}", file=sys.stderr)
        return 1
    if any(name.split(".")[0] == "torch" for _, _, name in names):
        print("`pdsl check --no-model` imports torch", file=sys.stderr)
        return 1
    seconds(commands["torch"], environment)
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(options.runs):
        for name in commands if run % 2 == 0 else reversed(commands):
            taken[name].append(seconds(commands[name], environment))
    ratio = statistics.median(a / b for a, b in zip(taken["check"], taken["torch"], strict=True))
    median = {name: statistics.median(times) for name, times in taken.items()}
    for name, words in (("check", "pdsl check --no-model"), ("torch", 'python -c "import torch"'), ("python", 'python -c ""')):
        low, _, high = statistics.quantiles(taken[name], n=4)
        print(f"{words:<28}{median[name] * 1e3:7.0f} ms   quartiles {low * 1e3:.0f} {high * 1e3:.0f}")
    print(f"{'first check, empty cache':<28}{first * 1e3:7.0f} ms")
    print(
        f"ratio {ratio:.3f} (target below {RATIO}); {median['check'] * 1e3:.0f} ms (target below {SECONDS * 1e3:.0f}); torch not imported"
    )
    if options.profile:
        print("\n  own ms   all ms   import")
        for own, total, name in sorted(names, reverse=True)[:10]:
            print(f"{own / 1e3:8.1f} {total / 1e3:8.1f}   {name}")
        mine = [(total, name) for _, total, name in names if name.startswith("pdsl")]
        print("\n  all ms   import of PDSL")
        for total, name in sorted(mine, reverse=True)[:15]:
            print(f"{total / 1e3:8.1f}   {name}")
    if options.json:
        Path(options.json).write_text(json.dumps({"ratio": ratio, "first": first, "seconds": taken}, indent=1))
    return int(ratio >= RATIO)


if __name__ == "__main__":
    sys.exit(main())
