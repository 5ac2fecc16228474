"""The requests that count as a scrape, and the answers to the others."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.server.scrape import Refusal, Response, method_of
from tests.cells import in_one_test

HOST = b"Host: localhost:9469"


@in_one_test(
    ("head", "method"),
    [
        (b"GET /metrics HTTP/1.1\r\n" + HOST, "GET"),
        (b"HEAD /metrics HTTP/1.1\r\n" + HOST, "HEAD"),
        (b"GET /metrics HTTP/1.0", "GET"),
        (b"GET /metrics?name[]=hegmd_gpu_up HTTP/1.1\r\nhost:\r\nAccept: */*;q=0.1\r\nX-Name: \xfc", "GET"),
        (b"GET http://localhost:9469/metrics HTTP/1.1\r\n" + HOST, "GET"),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\nContent-Length: 0", "GET"),
    ],
)
def test_these_are_requests_for_metrics(head: bytes, method: str) -> None:
    assert method_of(head) == method


@in_one_test(
    ("head", "status"),
    [
        (b"", "400"),
        (b"GET /metrics", "400"),
        (b"GET  /metrics HTTP/1.1\r\n" + HOST, "400"),
        (b"GET /metrics HTTP/1.1 \r\n" + HOST, "400"),
        (b"GET metrics HTTP/1.1\r\n" + HOST, "400"),
        (b"GET /metrics\x00 HTTP/1.1\r\n" + HOST, "400"),
        (b"GET /metrics HTTP/1.1\n" + HOST, "400"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\nX: b", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\n folded", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost : a", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\x00", "400"),
        (b"GET /metrics HTTP/1.1", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nhost: b", "400"),
        (b"GET /metrics HTTP/1.0\r\nHost: a\r\nhost: b", "400"),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\nContent-Length: 5", "400"),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\nContent-Length: +0", "400"),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\nTransfer-Encoding: chunked", "400"),
        (b"PRI * HTTP/2.0", "505"),
        (b"POST /metrics HTTP/1.1\r\n" + HOST, "405"),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST, "405"),
        (b"GET / HTTP/1.1\r\n" + HOST, "404"),
        (b"GET /metrics/ HTTP/1.1\r\n" + HOST, "404"),
        (b"GET //metrics HTTP/1.1\r\n" + HOST, "404"),
        (b"HEAD /x HTTP/1.1\r\n" + HOST, "404"),
    ],
)
def test_these_are_not(head: bytes, status: str) -> None:
    with pytest.raises(Refusal) as caught:
        method_of(head)
    assert caught.value.response.status.startswith(status)
    assert caught.value.response.with_body == (not head.startswith(b"HEAD"))


def test_a_refused_http_method_gets_the_allowed_ones() -> None:
    with pytest.raises(Refusal) as caught:
        method_of(b"PUT /metrics HTTP/1.1\r\n" + HOST)
    assert b"\r\nAllow: GET, HEAD\r\n" in caught.value.response.encode()


def test_a_response_to_head_is_that_to_get_without_its_body() -> None:
    with_body, without = (Response("200 OK", b"body", with_body=each).encode() for each in (True, False))
    head, _, body = with_body.partition(b"\r\n\r\n")
    assert body == b"body"
    assert without.partition(b"\r\n\r\n")[2] == b""
    assert [line for line in without.split(b"\r\n") if not line.startswith(b"Date")] == [
        *[line for line in head.split(b"\r\n") if not line.startswith(b"Date")],
        b"",
        b"",
    ]
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Length: 4\r\n" in head
    assert b"\r\nConnection: close" in head


PIECES = st.sampled_from(
    [b"GET", b"HEAD", b" ", b"/metrics", b"HTTP/1.1", b"\r\n", b"\n", b":", b"Host", b"a", b"\x00", b"\xff"]
)


@pytest.mark.thorough
@given(st.one_of(st.binary(), st.lists(PIECES, max_size=12).map(b"".join)))
def test_whatever_comes_is_taken_or_refused(head: bytes) -> None:
    try:
        assert method_of(head) in ("GET", "HEAD")
    except Refusal as refusal:
        assert refusal.response.encode().startswith(b"HTTP/1.1 ")  # noqa: PT017 - both ends are right


def test_the_date_of_a_response_is_written_as_http_wants_it() -> None:
    date = Response("200 OK", b"").encode().split(b"\r\n")[1].decode()
    assert datetime.strptime(date, "Date: %a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=timezone.utc)
