"""`gyre up` and `gyre down` in words."""

from __future__ import annotations

import sys

from deployments.exit_codes import FAILED
from deployments.local import configured_api, running_server
from deployments.platform import DEFAULT_PORT, alone, clean_up, running_platform, start_platform, stop_platform
from deployments.platform_state import PlatformError, PlatformState
from deployments.pools import POOLS
from deployments.supervisor import DRAIN_TIMEOUT


def bring_up(port: int | None, database: str | None) -> int:
    """Start the platform unless it runs, and say where it is; returns the exit code.

    Raises ValueError for a user's mistake.
    """
    with alone():
        if (state := running_platform()) is not None:
            end = "it ends with the last `gyre train` that uses it" if state.owned else "end it with `gyre down`"
            print(f"`gyre up` runs already; {end}\n{_describe(state)}")
            return 0
        if clean_up(end_flows=False):
            print("an earlier `gyre up` had died without `gyre down`; what it left was cleaned up")
        if port is None and database is None and running_server() is None and configured_api() is None:
            port = DEFAULT_PORT
        print("starting the Prefect server, the work pools and their workers ...", file=sys.stderr, flush=True)
        try:
            state = start_platform(port=port, database=database)
        except PlatformError as error:
            print(error, file=sys.stderr)
            return FAILED
    print(_describe(state))
    return 0


def bring_down() -> int:
    """Drain and end the platform, and say what remains; returns the exit code."""
    try:
        with alone():
            if running_platform() is not None:
                wait = f"up to {DRAIN_TIMEOUT:.0f} s for what is at work"
                print(f"ending everything that `gyre up` started ({wait}) ...", file=sys.stderr, flush=True)
            remarks = stop_platform()
    except PlatformError as error:
        print(error, file=sys.stderr)
        return FAILED
    if remarks is None:
        print("nothing runs that `gyre up` started")
        return 0
    print("\n".join(["everything that `gyre up` started has ended", *remarks.splitlines()]))
    if (server := running_server()) is not None:
        print(f"the Prefect server at {server.api_url} goes on: other runs use it, or it is to be kept")
    return 0


def _describe(state: PlatformState) -> str:
    lines = [
        f"Prefect UI: {state.api_url.removesuffix('/api')}",
        f"work pools: {', '.join(POOLS)}",
        f"for `prefect` commands: export PREFECT_API_URL={state.api_url}",
    ]
    for name, supervised in {"server": state.server, **state.workers}.items():
        if supervised.given_up:
            lines.append(f"{name} ended too often and stays down; the end of its log:\n{supervised.last_error}")
        elif supervised.restarts:
            lines.append(f"restarts of {name}: {supervised.restarts}")
    return "\n".join(lines)
