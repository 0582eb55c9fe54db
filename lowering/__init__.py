"""Tree to programs: resolving, rules, model facts, layouts, cuts, schedules, plan, programs, cost.

spec          what a file says, evaluated
facts         what planning needs to know of a model
plan          who holds what and who does what
"""
