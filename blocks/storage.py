"""Access to an S3 service as a Prefect block, for runs that name it in `storage.block`.

What the block holds goes from Prefect to the memory of the process that works for the run, and nowhere else.
"""

from __future__ import annotations

import asyncio

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from gyre_core.storage import S3Options, Storage, open_storage
from gyre_core.storage.s3_options import block_of, remember_block


class S3Access(Block):
    """Where an S3 service is, and how Gyre signs in there."""

    _block_type_name = "Gyre S3 access"
    _block_type_slug = "gyre-s3-access"
    _description = "Endpoint, region and credentials of the S3 service that holds the data of Gyre's runs."

    endpoint: str | None = Field(default=None, description="URL of a service other than Amazon's.")
    region: str | None = Field(default=None, description="Region of the bucket, where the service has several.")
    access_key_id: SecretStr | None = Field(default=None, description="Access key; without it, the environment's.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="Token of temporary credentials.")

    def options(self) -> S3Options:
        """The block in the core's terms; raises ValueError for an endpoint that is no URL, or has a user name."""
        return S3Options(
            endpoint=self.endpoint or None,
            region=self.region or None,
            access_key=_reveal(self.access_key_id),
            secret_key=_reveal(self.secret_access_key),
            session_token=_reveal(self.session_token),
        )


async def load_access(block: str | None) -> None:
    """Tell the core what the block named in `storage.block` holds; without one there is nothing to do.

    Raises ValueError when Prefect has no such block.
    """
    if block is None:
        return
    try:
        access = await S3Access.aload(block)
    except ValueError as error:
        raise ValueError(
            f"storage.block: Prefect has no block {S3Access.get_block_type_slug()}/{block} that can be read ({error}); "
            "make one of that name (see docs/storage.md)"
        ) from error
    remember_block(block, access.options())


async def open_data_storage(url: str) -> Storage:
    """The storage at a URL that another process gave, as its `Storage.url`, once the block that it names is loaded."""
    await load_access(block_of(url))
    return await asyncio.to_thread(open_storage, url)


def _reveal(secret: SecretStr | None) -> str | None:
    return (secret.get_secret_value() or None) if secret is not None else None
