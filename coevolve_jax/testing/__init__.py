"""Conformance suites for implementations of an extension point. Run them on yours.

Each module has one function. It raises AssertionError, in one sentence, for the first fault that it finds:

    engine.py       check_engine(make, policy): an engine (rollout/engine.py)
    environment.py  check_environment(name, ...): an environment family (envs/base.py)
    explorer.py     check_explorer(roles, ...): the four roles (explorers/base.py)
    strategy.py     check_strategy(name, config): a self-evolving method (strategies/base.py)

made_up.py holds the rollouts, tasks and services that strategies are run with; `campaign.py` a trainer for
campaigns.
"""
