"""The part of HTTP/1.1 that a scrape needs: valid requests, and the form of a response.

Pure and strict: a request that two programs could read differently is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.utils import formatdate

PATH = "/metrics"
PLAIN = "text/plain; charset=utf-8"
END_OF_HEAD = b"\r\n\r\n"

_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rf"({_WORD}) (?:http://[^/?#\s]+)?(/[!-~]*|\*) HTTP/(\d)\.\d")
_HEADER = re.compile(rf"({_WORD}):[ \t]*([\t -~\x80-\xff]*)")


@dataclass(frozen=True, slots=True)
class Response:
    status: str
    body: bytes
    content_type: str = PLAIN
    headers: tuple[str, ...] = ()
    with_body: bool = True

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Connection: close",
            *self.headers,
        )
        return "\r\n".join((*head, "", "")).encode("latin-1") + (self.body if self.with_body else b"")


class Refusal(Exception):
    """A request that gets another answer than metrics."""

    def __init__(self, status: str, why: str, *headers: str, with_body: bool = True) -> None:
        self.response = Response(status, f"{why}\n".encode(), headers=headers, with_body=with_body)


def method_of(head: bytes) -> str:
    """Return the method, GET or HEAD, of a request for the metrics. Raises Refusal for any other request."""
    first, *rest = head.decode("latin-1").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise Refusal("400 Bad Request", "this port speaks HTTP/1.1")
    if line[3] != "1":
        raise Refusal("505 HTTP Version Not Supported", "this port speaks HTTP/1.1")
    names: list[str] = []
    for each in rest:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise Refusal("400 Bad Request", "a header is not well formed")
        names.append(header[1].lower())
        if names[-1] == "transfer-encoding" or (names[-1] == "content-length" and header[2].strip() != "0"):
            raise Refusal("400 Bad Request", "a request for metrics has no body")
    if names.count("host") > 1 or ("host" not in names and first.endswith("1.1")):
        raise Refusal("400 Bad Request", "one Host header is needed")
    if line[1] not in ("GET", "HEAD"):
        raise Refusal("405 Method Not Allowed", "metrics can be read with GET", "Allow: GET, HEAD")
    if line[2].partition("?")[0] != PATH:
        raise Refusal("404 Not Found", f"metrics are at {PATH}", with_body=line[1] == "GET")
    return line[1]
