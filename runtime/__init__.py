"""Programs on torch.distributed: launching, groups, the executor, sharding, gradients, optimizer, data.

launch      local processes, or one rank of many under torchrun; failures of ranks
groups      the island as torch's WORLD, PDSL's own groups across islands
build       the model with the weights of one seeded process, only the owned ones kept
stage       a run of layers through the model's own forward
stand_ins   what a module gives that lives on another rank
shard       tensor parallel styles and FSDP2 units on what a rank owns
exchange    the reduce-scatter that gloo lacks
executor    one program, one step
gradients   sums across pipelines, overlapped with the backward pass; the global norm
optimizer   optimizers on local shards, rates
rows        which samples a step takes, in which order, and which a rank reads
session     all of it behind `step(batch)`
train       the loop over a data set, metrics, progress
verify      comparison with one process
digest      sums over state that do not depend on how it is split
checkpoint  state on disk as holdings; what is committed, what is damaged
saving      writing it, each rank its share
"""
