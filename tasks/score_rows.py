"""Reward functions in a process of a Ray cluster: loaded by one task, run on rows by the other.

A process of the cluster keeps the functions' own process between tasks, as long as the cluster keeps it.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rewards.calls import calls_from_json, make_call, results_to_json
from gyre_core.rewards.process import RewardProcess
from gyre_core.rewards.runner import FunctionSet

_processes: dict[str, RewardProcess] = {}
"""The functions' process by their text; one at most."""


@task(cache_policy=NO_CACHE, persist_result=False)
def load_functions(functions: str) -> str:
    """Load a set of functions, `FunctionSet.to_json`; returns each one's signature as JSON.

    Raises ValueError for a function that cannot be loaded here.
    """
    return json.dumps({name: asdict(signature) for name, signature in _process_of(functions).start().items()})


@task(cache_policy=NO_CACHE, persist_result=False)
def score_rows(functions: str, calls: str, timeout: float, retries: int) -> str:
    """The results of calls, as JSON both; failed rows are scored again as `make_call` does.

    Everything is text, as Prefect looks through each value of a list. Raises RewardError when a function breaks its
    contract.
    """
    process = _process_of(functions)
    return results_to_json([make_call(process, call, timeout, retries) for call in calls_from_json(calls)])


def _process_of(functions: str) -> RewardProcess:
    if functions not in _processes:
        while _processes:
            _processes.popitem()[1].close()
        _processes[functions] = FunctionSet.from_json(functions).process()
    return _processes[functions]
