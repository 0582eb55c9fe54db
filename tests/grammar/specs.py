"""Texts that several tests of the grammar read: the smallest useful spec, one with everything in it, and one of 49 lines to damage."""

from __future__ import annotations

SMALL = """\
pdsl 1

mesh {
  axis pp   = 2
  axis fsdp = 2
}

model "pdsl.models:gpt" { layers = 4; width = 128; heads = 4; context = 64 }

shard    { "**" => fsdp(fsdp) }
pipeline over pp { schedule = one_f_one_b(microbatches = 4) }

train {
  data      = "pdsl.data:python_source"
  batch     = 16
  steps     = 100
  optimizer = adamw(lr = 1e-3)
}
"""

LARGE = """\
pdsl 1                                        # language edition
import "clusters/h200.pdsl" as hw             # hw.nodes, hw.memory, hw.mtbf
param layers: int = 32                        # --set layers=48
let half = layers / 2

cluster {
  nodes          = hw.nodes
  ranks_per_node = 8                          # the ranks of a node die together
  device         = cuda                       # cuda | cpu | auto
  memory         = hw.memory
}

mesh {                                        # outermost first; the product is the number of ranks
  axis dp   = rest                            # at most one `rest`; pipelines are its slices
  axis pp   = 2 to 4                          # a range: the planner may use pipelines of 2, 3 or 4 stages
  axis fsdp = 2
  axis tp   = 4
}

model "models.llama:build" { layers = layers }

shard {                                       # ordered: first match wins; each rule must match; every parameter must be covered
  "tok_embeddings.weight"         => [tp, _]  # one slot per dim; _ is whole; (a, b) is a major, b minor
  "layers.*.attn.w{q,k,v}.weight" => colwise(tp) + fsdp(fsdp)
  "layers.*.attn.wo.weight"       => rowwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w{1,3}.weight"    => colwise(tp) + fsdp(fsdp)
  "layers.*.mlp.w2.weight"        => rowwise(tp) + fsdp(fsdp)
  "**.norm*.weight"               => replicate()
  "**"                            => fsdp(fsdp)
}

pipeline over pp {
  stages   = balanced                         # or: stage first { "tok_embeddings", "layers[0..half]" } ...
  schedule = auto(microbatches = 16)          # gpipe, one_f_one_b, interleaved_1f1b(virtual = 2), looped_bfs, interleaved_zero_bubble,
                                              # zbv, dualpipe_v, rows("x.csv")
}

precision { params = bf16; reduce = fp32; output = fp32 }
memory    { recompute = "layers.*"; offload = none }

fault_budget {
  unit    = node
  lose    = 1                                 # see the design for what this promises
  recover = [reroute, retemplate, restore]    # tried in this order, cheapest first
  silence = 30s                               # a node that says nothing for so long is lost
  spares  = 0
}

freeze {
  prefix   = bound(alpha = 1/3, every = 1 epoch)   # or gradnorm(...), plateau(...), at(step = 2000)
  keep     = 2                                     # layers that never freeze
  repack   = when(gain > 5%)                       # shorter and more pipelines, batch unchanged
  cache    = host(limit = 8GiB)
  guard    = unfreeze(worse = 0.5%, patience = 2)
}

checkpoint { path = "runs/llama"; every = 500; keep = 3; mode = async }

train {
  data      = "data.c4:stream"
  batch     = 1024
  last      = drop                            # drop | pad
  steps     = 100000
  optimizer = adamw(lr = 3e-4, weight_decay = 0.1)
  rate      = cosine(warmup = 2000, floor = 0.1)
  clip      = 1.0
  loss      = mean(over = tokens)             # mean(over = samples) | sum
  seed      = 17
}

assert half * 2 == layers, "an even number of layers, please"

profile laptop { mesh.dp = 1; mesh.pp = 2; mesh.tp = 1; cluster.device = cpu; train.batch = 16 }
"""

DAMAGEABLE = """\
pdsl 1
import "clusters/h200.pdsl" as hw             # hw.nodes
param layers: int = 32
param nodes: int = hw.nodes
let half = layers / 2

mesh main {                                   # outermost axis first
  axis pp = 2 @inter
  axis dp = nodes
  axis tp = 8 @intra
}
model "models.llama:build" { layers = layers; tied = false }

shard {                                       # first match wins
  "tok_embeddings.weight"             => [tp, _]
  "layers.*.attn.w{q,k,v}.weight"     => colwise(tp) + fsdp(dp)
  "layers.*.attn.wo.weight"           => [_, tp]
  "output.weight"                     => [(dp, tp), _]
  "**.norm*.weight"                   => replicate()
  "**"                                => fsdp(dp)
}
pipeline over pp {
  stage first { "tok_embeddings", "layers[0..half]" }
  stage last  { "layers[half..]", "norm", "output" }
  schedule = interleaved_1f1b(microbatches = 16, virtual = 2)
}
precision { params = bf16; reduce = fp32 }

fault_budget {
  unit     = node
  lose     = 1
  silence  = 30s
  recover  = [reroute, restore]
  restarts = 5 per 24h
}
freeze {
  prefix = bound(alpha = 1/3, every = 1 epoch)
  repack = when(gain > 5%)
  cache  = host(limit = 8GiB)
}
checkpoint { every = 500; keep = 3; path = "runs/llama/ckpt" }
train {
  batch     = 1024
  optimizer = adamw(lr = 3e-4, betas = [0.9, 0.95])
  clip      = 1.0
}
assert half * 2 == layers, "an even number"
assert nodes > 1
profile laptop { mesh.dp = 1; mesh.tp = 1 }
"""
