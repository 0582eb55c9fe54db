"""A small job for tests of the command line."""

SPEC = """\
pdsl 1
mesh { axis pp = 2 }
model "pdsl.models:gpt" { layers = 2; width = 16; heads = 2; context = 8 }
shard { "**" => replicate() }
pipeline over pp { schedule = one_f_one_b(microbatches = 2) }
train {
  data = source("pdsl.data:python_source", context = 8)
  batch = 4; steps = 6
  optimizer = adamw(lr = 1e-2)
}
"""
