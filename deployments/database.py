"""The database of a local Prefect server: SQLite, or a PostgreSQL that `GYRE_DATABASE_URL` names.

The URL holds a password. It travels in the environment alone: it is written to no file and shown to nobody.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote, urlsplit

import asyncpg

from deployments.environment import mask_url

DATABASE_VARIABLE = "GYRE_DATABASE_URL"
"""Environment variable with the URL of a PostgreSQL database, `postgresql://USER:PASSWORD@HOST/DATABASE`."""

_CONNECT_TIMEOUT = 10
_SCHEME = re.compile(r"^postgres(ql)?(\+asyncpg)?://")


def server_url(url: str) -> str:
    """The URL as a Prefect server wants it; raises ValueError for one that is not of PostgreSQL."""
    if not _SCHEME.match(url):
        raise ValueError(
            f"the database URL {mask_url(url)} is not of PostgreSQL; write postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    return _SCHEME.sub("postgresql+asyncpg://", url)


def check_database(url: str) -> None:
    """Connect once; raises ValueError when the database does not let us in within ten seconds."""
    address = server_url(url).replace("+asyncpg", "", 1)
    try:
        asyncio.run(_connect(address))
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        reason = hide_password(str(error) or type(error).__name__, url)
        raise ValueError(
            f"the database {mask_url(url)} does not let us in ({reason}); check that it runs, and user, password and "
            "database name"
        ) from None


def hide_password(text: str, url: str | None) -> str:
    """`text` with the password of a database URL, and the URL itself, replaced by stars."""
    if not url:
        return text
    secret = urlsplit(url).password
    hidden = text.replace(url, mask_url(url)).replace(server_url(url), mask_url(url))
    return hidden.replace(secret, "***").replace(unquote(secret), "***") if secret else hidden


async def _connect(address: str) -> None:
    connection = await asyncpg.connect(address, timeout=_CONNECT_TIMEOUT)
    await connection.close()
