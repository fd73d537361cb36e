"""What an S3 URL asks for, and that no text holds a secret."""

import pytest

from gyre_core.storage import S3Options, open_storage
from gyre_core.storage.s3_options import block_is_loaded, block_of, remember_block, s3_url, url_options


def test_a_url_carries_block_and_endpoint_and_nothing_of_what_the_block_holds():
    options = S3Options("http://one:9000", "eu", "key-1", "secret-1", "token-1")
    remember_block("block of test_s3_options", options)
    url = s3_url("s3://bucket/runs", "block of test_s3_options", None)
    assert url_options(url) == options
    assert block_of(url) == "block of test_s3_options"
    moved = s3_url("s3://bucket/runs", "block of test_s3_options", "https://two")
    assert url_options(moved) == S3Options("https://two", "eu", "key-1", "secret-1", "token-1")
    storage = open_storage(moved).child("a")
    assert storage.url == moved.replace("/runs", "/runs/a")
    for text in (repr(options), str(options), url, moved, repr(storage), str(vars(storage))):
        assert not any(word in text for word in ("secret-1", "token-1"))


def test_without_both_the_environment_decides():
    assert s3_url("s3://bucket/runs", None, None) == "s3://bucket/runs"
    assert url_options("s3://bucket/runs") == S3Options()
    assert block_of("s3://bucket/runs") is None


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "http://user:secret-2@host", "http://", "http://h h"])
def test_an_endpoint_that_is_no_url_of_a_service_is_refused_and_not_repeated(endpoint):
    with pytest.raises(ValueError, match="is a URL like") as caught:
        S3Options(endpoint=endpoint)
    assert "secret-2" not in str(caught.value)


def test_a_block_that_nobody_loaded_and_a_query_that_is_unknown_are_refused():
    assert not block_is_loaded("nobody's")
    with pytest.raises(ValueError, match="the block nobody's has not been loaded"):
        open_storage(s3_url("s3://bucket/runs", "nobody's", None))
    with pytest.raises(ValueError, match="may name block and endpoint alone"):
        open_storage("s3://bucket/runs?region=eu")


@pytest.mark.parametrize("url", ["s3://", "s3:///folder"])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(ValueError, match="names no bucket"):
        open_storage(url)


def test_a_protocol_that_gyre_does_not_write_to_is_refused():
    with pytest.raises(ValueError, match="'gs' is not supported; use a path, s3://"):
        open_storage("gs://bucket/runs")
