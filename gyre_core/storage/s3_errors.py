"""What an S3 service answers: what is worth another try, and one clear sentence for what is not."""

from __future__ import annotations

import errno
import os
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from gyre_core.storage.base import OutOfSpaceError, StorageError

REQUEST_ERRORS = (OSError, BotoCoreError, ResponseParserError, aiohttp.ClientError)
"""Everything that a request through s3fs raises when it fails."""

_UNREACHABLE = (
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
)
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_REFUSED_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "InvalidSecurity",
    "TokenRefreshRequired",
}
_OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
    "301",
    "307",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
"""Codes of Ceph and MinIO for a full service or quota, beside the status 507 that others answer with."""
_NEEDED = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject and s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
}


class ConflictError(StorageError):
    """Another write of the same name was under way; whoever raced tries again."""


def reason_to_repeat(error: BaseException) -> str | None:
    """Why another try may succeed: `throttled`, `conflict`, `failed` or `unreachable`; None when it will not."""
    answer = _answer(error)
    if answer is None:
        broken = isinstance(error, _UNREACHABLE) and not isinstance(error, SSLError)
        return "unreachable" if broken else None
    code, _, status = answer
    if _is_full(code, status):
        return None
    if code in _THROTTLED or status in (429, 503):
        return "throttled"
    if status == 409:
        return "conflict"
    return "failed" if code == "RequestTimeout" or (status >= 500 and status != 501) else None


def named_error(error: BaseException, operation: str, url: str, endpoint: str) -> OSError:
    """The error to raise for a request that no other try would mend.

    FileNotFoundError and FileExistsError where the object is not there, or is; OutOfSpaceError where there is no space
    for it; else StorageError with a sentence.
    """
    answer = _answer(error)
    if answer is None:
        return StorageError(_sentence_without_answer(error, url, endpoint))
    code, message, status = answer
    if status == 412:
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url)
    if status == 409:
        return ConflictError(f"{url}: another write of this name is under way ({code})")
    if status == 404 and code != "NoSuchBucket":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if _is_full(code, status):
        full = f"no space left at {endpoint} for {url} ({status} {code}); free some, or raise the quota"
        return OutOfSpaceError(errno.ENOSPC, full)
    return StorageError(_sentence(code, message, status, operation, url, endpoint))


def describe(error: BaseException) -> str:
    """What went wrong, in a few words."""
    answer = _answer(error)
    if answer is None:
        return str(error) or type(error).__name__
    code, message, status = answer
    return f"{status} {code}" if code == message or not message else f"{status} {code}: {message}"


def _sentence(code: str, message: str, status: int, operation: str, url: str, endpoint: str) -> str:
    if code == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        return f"there is no bucket {bucket} at {endpoint}; create it, or correct storage.url or the endpoint"
    if code in _REFUSED_CREDENTIALS:
        return (
            f"{endpoint} refuses the credentials for {url} ({code}); correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
            "and AWS_SESSION_TOKEN, or the block that storage.block names"
        )
    if code == "RequestTimeTooSkewed":
        return f"{endpoint} refuses requests as this machine's clock is off; set the clock"
    if code in _OTHER_REGION:
        return f"{url} lies in another region than the one asked ({code}); set AWS_REGION, or region in the block"
    if status == 403:
        return (
            f"no permission for {url} at {endpoint}; the credentials need {_NEEDED[operation]} there "
            "(see docs/storage.md)"
        )
    return f"{url}: {endpoint} refuses {operation} ({status} {code}: {message})"


def _sentence_without_answer(error: BaseException, url: str, endpoint: str) -> str:
    if isinstance(error, (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)):
        return (
            f"there are no credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Prefect "
            "block in storage.block"
        )
    if isinstance(error, SSLError):
        return f"{endpoint} shows no certificate that this machine trusts; set AWS_CA_BUNDLE, or correct the endpoint"
    return f"{url}: {describe(error)}"


def _is_full(code: str, status: int) -> bool:
    return code in _FULL or status == 507


def _answer(error: BaseException) -> tuple[str, str, int] | None:
    """Code, message and HTTP status of the service's answer; None when there was none."""
    found: dict[str, Any] | None = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not found or "Error" not in found:
        return None
    status = int(found.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return str(found["Error"].get("Code", status)), str(found["Error"].get("Message", "")), status
