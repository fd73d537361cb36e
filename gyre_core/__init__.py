"""Gyre's core: a plain library that knows no Prefect."""
