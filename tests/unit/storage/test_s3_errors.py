"""Answers of S3 services: which are worth another try, and what is told of the others."""

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from gyre_core.storage import OutOfSpaceError, StorageError
from gyre_core.storage.s3_errors import ConflictError, named_error, reason_to_repeat

URL, ENDPOINT = "s3://bucket/a", "http://service"


def answer(status, code, message="in words"):
    """An answer as s3fs raises it: translated, with botocore's error as the cause."""
    error = OSError(message)
    found = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = ClientError(found, "PutObject")
    return error


REASONS = [
    (answer(503, "SlowDown"), "throttled"),
    (answer(503, "503"), "throttled"),
    (answer(429, "TooManyRequests"), "throttled"),
    (answer(400, "RequestLimitExceeded"), "throttled"),
    (answer(409, "ConditionalRequestConflict"), "conflict"),
    (answer(409, "OperationAborted"), "conflict"),
    (answer(500, "InternalError"), "failed"),
    (answer(502, "502"), "failed"),
    (answer(400, "RequestTimeout"), "failed"),
    (EndpointConnectionError(endpoint_url=ENDPOINT), "unreachable"),
    (ReadTimeoutError(endpoint_url=ENDPOINT), "unreachable"),
    (TimeoutError(), "unreachable"),
    (answer(403, "AccessDenied"), None),
    (answer(404, "NoSuchKey"), None),
    (answer(404, "NoSuchBucket"), None),
    (answer(412, "PreconditionFailed"), None),
    (answer(501, "NotImplemented"), None),
    (answer(507, "XMinioStorageFull"), None),
    (answer(507, "507"), None),
    (answer(403, "QuotaExceeded"), None),
    (SSLError(endpoint_url=ENDPOINT, error="self-signed"), None),
    (NoCredentialsError(), None),
    (PermissionError("of the local disk"), None),
]


@pytest.mark.parametrize(("error", "reason"), REASONS)
def test_what_another_try_may_mend(error, reason):
    assert reason_to_repeat(error) == reason


NAMED = [
    (answer(404, "NoSuchKey"), "get_object", FileNotFoundError, URL),
    (answer(404, "404"), "head_object", FileNotFoundError, URL),
    (answer(412, "PreconditionFailed"), "put_object", FileExistsError, URL),
    (answer(409, "ConditionalRequestConflict"), "put_object", ConflictError, "another write of this name"),
    (answer(404, "NoSuchBucket"), "put_object", StorageError, "there is no bucket bucket at http://service; create"),
    (answer(403, "AccessDenied"), "list_objects_v2", StorageError, "need s3:ListBucket there"),
    (answer(403, "403"), "head_object", StorageError, "need s3:GetObject and s3:ListBucket there"),
    (answer(400, "ExpiredToken"), "get_object", StorageError, "refuses the credentials for s3://bucket/a"),
    (answer(403, "RequestTimeTooSkewed"), "get_object", StorageError, "this machine's clock is off"),
    (answer(301, "PermanentRedirect"), "put_object", StorageError, "lies in another region"),
    (answer(507, "507"), "put_object", OutOfSpaceError, "no space left at http://service for s3://bucket/a (507 507)"),
    (answer(403, "QuotaExceeded"), "upload_part", OutOfSpaceError, "no space left at http://service"),
    (answer(400, "XMinioAdminBucketQuotaExceeded"), "put_object", OutOfSpaceError, "free some, or raise the quota"),
    (answer(400, "EntityTooLarge"), "put_object", StorageError, "refuses put_object (400 EntityTooLarge: in words)"),
    (NoCredentialsError(), "get_object", StorageError, "there are no credentials for s3://bucket/a; set AWS_ACCESS"),
    (SSLError(endpoint_url=ENDPOINT, error="x"), "get_object", StorageError, "no certificate that this machine trusts"),
]


@pytest.mark.parametrize(("error", "operation", "kind", "told"), NAMED)
def test_what_it_will_not_mend_is_told_in_a_sentence(error, operation, kind, told):
    named = named_error(error, operation, URL, ENDPOINT)
    assert type(named) is kind
    assert told in str(named)
