"""Programs on torch.distributed: launching, groups, the executor, sharding, gradients, optimizer, data.

launch      local processes, or one rank of many under torchrun; failures of ranks
groups      PDSL's own groups across islands
meshes      the island as torch's WORLD, with a mesh for each axis
build       the model with the weights of one seeded process, only the owned ones kept
stage       a run of layers through the model's own forward
stand_ins   what a module gives that lives on another rank
tensor_parallel  which modules are split over tensor axes, and the sequence between them
tensor_collectives  what tensor ranks exchange, forward and backward
shard       FSDP2 units on what a rank owns
exchange    the reduce-scatter that gloo lacks
compiled    layers compiled with torch.compile
executor    one program, one step
split_backward  a backward in two halves: gradients of what a stage received, then those of its weights
unit_ends   how FSDP2 units reduce at the end of such a backward
gradients   sums across pipelines, overlapped with the backward pass; the global norm
optimizer   optimizers on local shards, rates
rows        which samples a step takes, in which order, and which a rank reads
feed        data sets as sources of these rows: by index, or one after another
validation  the loss on held-out data, without a trace in what is trained
session     all of it behind `step(batch)`
train       the loop over a data set, metrics, progress
verify      comparison with one process
digest      sums over state that do not depend on how it is split
checkpoint  state on disk as holdings; what is committed, what is damaged
saving      writing it, each rank its share
wire        JSON lines between the processes of a run
happenings  what an agent's state machine takes and gives
votes       who may speak for whom
view        who is there, as one agent sees it; silence
agreement   proposal, promise, decision
membership  the whole state machine, and the rules that make it safe
peers       the connections between agents
agents      the process of a node: its ranks, its peers, its clock
ranks       forking ranks; which tasks there are
link        what a rank knows of the cluster
stores      the store of one decision
nursery     imports torch once and forks the agents of simulated nodes
nurse       the launcher's side of it
cluster     a run on simulated nodes, and the handle to disturb it
resilient   launching it
rendezvous  how agents on real machines meet
node        the process of a real node
"""
