"""What the demonstrations of an environment family are made of: a module for each, chosen by --environment.

PYTHON, LIMITS                       the family's interpreter; limits of a demonstration (its max_length is a row)
make_tasks(pool, count, rng)         tasks in scenarios of the train split, with references that work
tools(task), action(call)            what is on offer; what a habit belongs to
actions()                            all of these
sibling(call)                        the call of another action, taken for this one
wrong_argument(call, task, rng)      the call about something else
retell(text, another)                a demonstration in which another(name) stands for each name
"""
