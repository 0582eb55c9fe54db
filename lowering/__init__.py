"""Tree to programs: resolving, rules, model facts, layouts, cuts, schedules, plan, programs, cost.

text to Spec
    blocks                           the table of the language: every block, key and call
    values, evaluate, coerce         exact values, expressions, what a key takes
    names, leaves, keys              params and imports; written values and what overrides them; reading by the table
    text_patterns, shard_rules       patterns, layouts and stages
    resolve                          a tree to the Spec, with the origin of every value
    spec                             what a file says, evaluated
    mesh, places                     axes with roles, ranks and islands
    rules, suppress, check           what is wrong with a text, in one run
    pending                          what is planned around and not executed yet

model to facts
    facts, facts_cache, depends      what planning needs to know of a model, kept on disk until what it was read from changes
    probe, probe_pass, probe_rows    reading it without weights (the only part that imports torch)
    chain                            from what was seen to layers
    tensor_facts, tensor_reading     what layouts over tensor axes do to a model, kept on disk too
    probe_tensor, probe_tensor_trace finding it out: a tensor rank held against the whole model; probe_placed, probe_tensor_flow, probe_saved help
    factory                          finding and calling what a spec names

Spec and facts to programs
    layouts, cuts, batches           how parameters lie, where layers are cut, how samples are split
    schedule, schedules              tables of operations, and what is known of each named one
    loop_schedules, v_schedules      their rows; v_patterns, schedule_rows: of those that hold little, and from a file
    simulate, transfers, makespan    when what happens, what is sent in which order; schedule_check, deadlock look for mistakes
    auto, searched                   plans whose schedule is searched for, whole or anew after a loss; search_report is what they keep of it
    search, search_problem           the search; portfolio, list_schedule, local_search, exact_search, periods find candidates, bounds the end;
                                     frontier: what can come next
    plan, planner, ownership         who holds what and who does what
    plan_check                       what is wrong with a plan that came from a file
    parts, styles                    which part of a dim an axis gives a rank; what split modules take and give
    crossings                        what crosses from stage to stage, as a rank holds it
    units                            what FSDP2 gathers together, and how often
    composability                    which features work together, what torch does with them, what shows it
    program, programs, boxes         one rank's list of actions
    forward_program                  the same without backwards, for held-out data
    cost, tensor_traffic             what it costs; serial: JSON

From one plan to the next
    holdings, cells                  who has which box of which tensor, at which step; boxes as sets
    roles                            which node plays which part, so that most bytes stay
    transition, tables, covers       what must move; transition_check looks at it
    sources, flow, rounds            who sends what, balanced; in which order

under failures, on paper
    traces                           when nodes come and go: read or drawn, and how they strain a budget
    goodput                          a run under a trace: what counts, and where the time goes
    workload                         a plan as what is simulated: steps and pipelines by number of nodes
    strategies, rivals               PDSL's answers to a loss; models of Oobleck, Varuna and Bamboo
    published                        the constants of Oobleck's article, and a replay of its simulation
"""
