"""Watching a run: metrics, alarms, sample completions, reports and the progress line."""
