"""Prefect's UI offers the block with the access to S3 once Gyre was deployed, its secrets hidden."""

import pytest
from prefect.client.orchestration import get_client

from blocks.storage import S3Access


@pytest.mark.usefixtures("platform")
async def test_the_ui_offers_the_block_and_hides_its_secrets():
    async with get_client() as client:
        block_type = await client.read_block_type_by_slug("gyre-s3-access")
        schema = await client.read_block_schema_by_checksum(S3Access._calculate_schema_checksum())
    assert schema.block_type_id == block_type.id
    assert set(schema.fields["properties"]) == {
        "endpoint",
        "region",
        "access_key_id",
        "secret_access_key",
        "session_token",
    }
    assert set(schema.fields["secret_fields"]) == {"access_key_id", "secret_access_key", "session_token"}
