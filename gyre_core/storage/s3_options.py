"""Where an S3 service is and how one signs in there, in memory alone.

What is not given here comes from the environment, as botocore reads it: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, a profile, the role of the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, urlencode, urlsplit

_ENDPOINT = re.compile(r"https?://[^/@\s]+(/[^@\s]*)?")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Endpoint, region and credentials of an S3 service; the credentials are in no text of this object.

    Raises ValueError for an endpoint that is no http(s) URL, or one with a user name.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.endpoint is not None and not _ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(
                "the endpoint of an S3 service is a URL like https://s3.example.org, without user name or password; "
                "correct it in storage.endpoint, the Prefect block or AWS_ENDPOINT_URL"
            )


_loaded: dict[str, S3Options] = {}


def remember_block(name: str, options: S3Options) -> None:
    """Hold what the Prefect block that `storage.block` names has told, until this process ends."""
    _loaded[name] = options


def s3_url(url: str, block: str | None, endpoint: str | None) -> str:
    """A URL with the block and the endpoint in its query, so that it alone opens the storage in another process.

    It names the block and holds nothing of what is in it.
    """
    access = {name: value for name, value in (("block", block), ("endpoint", endpoint)) if value is not None}
    return f"{url}?{urlencode(access)}" if access else url


def block_of(url: str) -> str | None:
    """The name of the block that must be loaded before the URL can be opened; None for none."""
    return parse_qs(urlsplit(url).query).get("block", [None])[0]


def block_is_loaded(name: str) -> bool:
    """Whether this process was told what the block holds."""
    return name in _loaded


def url_options(url: str) -> S3Options:
    """The options that a URL asks for; an endpoint that it gives goes before the block's own.

    Raises ValueError for a block that nobody has loaded, and for a query that asks for anything else.
    """
    asked = parse_qs(urlsplit(url).query)
    if asked.keys() - {"block", "endpoint"}:
        raise ValueError(f"storage URL {url!r}: its query may name block and endpoint alone")
    block, endpoint = (asked.get(name, [None])[0] for name in ("block", "endpoint"))
    if block is not None and block not in _loaded:
        raise ValueError(
            f"storage.block: the block {block} has not been loaded; Gyre's commands and flows do so from Prefect, and "
            "other programs set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and leave storage.block out"
        )
    options = S3Options() if block is None else _loaded[block]
    return options if endpoint is None else replace(options, endpoint=endpoint)
