"""States of flow runs, as filters ask for them."""

from __future__ import annotations

from collections.abc import Iterable

from prefect.client.schemas.filters import FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType

OPEN_STATES = tuple(kind for kind in StateType if kind not in TERMINAL_STATES)
"""States of what has not ended."""


def in_states(states: Iterable[StateType]) -> FlowRunFilterState:
    """The filter of flow runs that are in one of these states."""
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))


def state_of(run: FlowRun) -> StateType | None:
    """The kind of state that a flow run was in when it was read."""
    return run.state.type if run.state is not None else None
