"""How the command `gyre` ends; 0 is success."""

FAILED = 1
"""A run failed, was stopped by an alarm, or does not pass a check."""
USER_ERROR = 2
"""A mistake in the configuration or in the command line, told in one sentence."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it."""
TERMINATED = 143
"""SIGTERM, as shells count it; the run was saved first."""
