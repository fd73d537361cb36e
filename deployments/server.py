"""The Prefect server that Gyre starts on SQLite: every transaction takes the write lock as it begins.

By default a transaction that reads first and writes later fails at once when another one, of the server's own
services, has committed in between; the client then sleeps for two seconds and asks again. On this server it waits for
the lock instead, which takes milliseconds.

    python -m uvicorn --factory deployments.server:create_app
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from fastapi import FastAPI
from prefect.server.api.server import create_app as create_prefect_app
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

_begin_transaction = AioSqliteConfiguration.begin_transaction


def create_app() -> FastAPI:
    """The server's application."""
    # Prefect looks its SQLite configuration up by class, so the class itself is given the method.
    cast(Any, AioSqliteConfiguration).begin_transaction = _begin_with_write_lock
    return create_prefect_app()


def _begin_with_write_lock(
    self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
    return _begin_transaction(self, session, with_for_update=True)
