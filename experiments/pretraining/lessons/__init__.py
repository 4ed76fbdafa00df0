"""The material for demonstrations: one module per environment family, chosen by --environment.

Each module defines:

PYTHON                            the family's interpreter
LIMITS                            limits of a demonstration; max_length is also the length of a row
make_tasks(pool, count, rng)      tasks in scenarios of the train split, with reference calls that work
tools(task)                       the tools that the environment offers
action(call)                      the action (tool, or verb) that a habit belongs to
actions()                         all actions
sibling(call)                     the call of a similar action, mistaken for this one
wrong_argument(call, task, rng)   the same call with a wrong argument
retell(text, another)             a demonstration in which another(name) replaces each name
"""
