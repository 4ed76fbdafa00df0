"""Conformance suites: what every implementation of a seam must do, for you to run on yours.

Each module has one function that takes what makes your implementation and raises AssertionError, in one sentence,
for the first thing that it does wrong:

    engine.py       check_engine(make, policy): what generates (rollout/engine.py)
    environment.py  check_environment(name, ...): an environment family (envs/base.py)
    explorer.py     check_explorer(roles, ...): the four roles (explorers/base.py)
    strategy.py     check_strategy(name, config): a self-evolving method (strategies/base.py)
"""
