"""The REST interface: HeGM's requests and answers, and what is refused, cut off or turned away."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmcompat import rest
from hegmcompat.control import Control
from hegmcompat.rest import uid_at
from hegmcompat.surroundings import read_surroundings
from tests.patience import HANG_S

TOKEN = "0123456789abcdef"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[rest.Server]:
    server = rest.serve(_control(tmp_path), "127.0.0.1", 0, None, limit_s=0.3)
    yield server
    server.close()


def _control(folder: Path) -> Control:
    return Control(read_surroundings({"HEGM_CHECKPOINT_DIR": str(folder), "HEGM_POLL_INTERVAL": "0.01"}))


def _post(port: int, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, sent, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def _raw(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_the_answers_are_those_of_hegm(served: rest.Server, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "lock").touch()
    assert _post(served.port, "/resume", {"ppids": [7, 8]}) == (200, {"results": {"7": "lock-removed", "8": "no-lock"}})
    assert _post(served.port, "/resume", {"all": True}) == (200, {"results": {}})
    assert _post(served.port, "/checkpoint", {"pids": [0]}) == (200, {"results": {"0": "no-such-process"}})
    assert _post(served.port, "/checkpoint", {"all": True}) == (200, {"results": {}})
    assert _post(served.port, "/checkpoint", b"") == (200, {"results": {}})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/checkpoint", {"pids": [1], "all": True}, (400, "specify either 'pids' or 'all', not both")),
        ("/resume", {"ppids": [1], "all": True}, (400, "specify either 'ppids' or 'all', not both")),
        ("/checkpoint", {"pids": ["one"]}, (400, "invalid 'pids' payload")),
        ("/checkpoint", {"pids": "12"}, (400, "invalid 'pids' payload")),
        ("/resume", {"ppids": [None]}, (400, "invalid 'ppids' payload")),
        ("/status", {}, (404, "not-found")),
        ("/checkpoint", b"{", (400, "invalid JSON")),
        ("/checkpoint", b"[" * 60000, (400, "invalid JSON")),
        ("/checkpoint", [1], (400, "invalid JSON: an object is needed")),
    ],
)
def test_faults_are_reported(served: rest.Server, path: str, body: Any, answer: tuple[int, str]) -> None:
    assert _post(served.port, path, body) == (answer[0], {"error": answer[1]})


def test_a_body_is_not_read_beyond_its_limit(served: rest.Server) -> None:
    head = f"POST /resume HTTP/1.1\r\nContent-Length: {rest.MAX_BODY_BYTES + 1}\r\n\r\n"
    assert b" 413 " in _raw(served.port, head.encode()).splitlines()[0]


@pytest.mark.parametrize("line", ["Transfer-Encoding: chunked", "Content-Length: many", "Content-Length: -1"])
def test_a_body_without_a_length_is_refused(served: rest.Server, line: str) -> None:
    assert b" 411 " in _raw(served.port, f"POST /resume HTTP/1.1\r\n{line}\r\n\r\n".encode()).splitlines()[0]


def test_requests_from_a_web_page_are_refused(served: rest.Server) -> None:
    found = _post(served.port, "/resume", {"all": True}, {"Origin": "https://example.org"})
    assert found == (403, {"error": "not-for-browsers"})


def test_another_method_gets_an_answer_that_can_be_parsed(served: rest.Server) -> None:
    output = _raw(served.port, b"GET /checkpoint HTTP/1.0\r\n\r\n")
    assert output.startswith(b"HTTP/1.0 501 ")
    assert json.loads(output.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("begun", [b"", b"POST /resume HT", b"POST /resume HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"])
def test_a_client_that_sends_half_a_request_is_not_waited_for(served: rest.Server, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S) as connection:
        connection.sendall(begun)
        output = b"".join(iter(lambda: connection.recv(4096), b""))
    assert output == b"" or b" 408 " in output.splitlines()[0]


def test_a_client_that_sends_single_bytes_gets_no_longer_limit(served: rest.Server) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=0.05) as connection:
        assert _is_cut_off(connection, bytes_sent=1000)  # long before so many are through


def _is_cut_off(connection: socket.socket, bytes_sent: int) -> bool:
    for _ in range(bytes_sent):
        try:
            connection.sendall(b"X")
            if not connection.recv(4096):
                return True
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return True
    return False


def test_more_connections_than_there_are_threads_for_are_turned_away_and_others_served_again(
    served: rest.Server,
) -> None:
    held = [socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S) for _ in range(rest.MAX_CONNECTIONS)]
    try:
        assert _raw(served.port, b"").startswith(b"HTTP/1.0 503 ")
        for connection in held:
            assert connection.recv(1) == b""  # their time was up
    finally:
        for connection in held:
            connection.close()
    status, _answer = _post(served.port, "/resume", {"all": True})
    assert status == 200


@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ä"])
def test_with_a_token_other_callers_are_refused(tmp_path: Path, given: str | None) -> None:
    server = rest.serve(_control(tmp_path), "127.0.0.1", 0, TOKEN)
    try:
        headers = {} if given is None else {"Authorization": given.encode("latin-1").decode("latin-1")}
        assert _post(server.port, "/resume", {"all": True}, headers) == (401, {"error": "unauthorized"})
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert _post(server.port, "/resume", {"all": True}, right) == (200, {"results": {}})
    finally:
        server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_is_not_let_in_without_a_token(served: rest.Server) -> None:
    """A port on loopback is open to every user of the machine, while HeGM's users had a container of their own."""
    code = (
        "import http.client, os, sys; os.setuid(65534); c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]));"
        "c.request('POST', '/resume', b'{}'); print(c.getresponse().status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(served.port)], capture_output=True, text=True, check=False)
    assert done.stdout == "403\n", done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_peer_is_identified_by_the_kernel(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listening,
        socket.create_connection(listening.getsockname()[:2], timeout=HANG_S),
        listening.accept()[0] as accepted,
    ):
        assert uid_at(accepted) == os.geteuid()


def test_a_peer_that_disconnected_does_not_count_as_root() -> None:
    """In the kernel's table, a socket that its process has closed belongs to user 0."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        caller = socket.create_connection(listening.getsockname(), timeout=HANG_S)
        with listening.accept()[0] as accepted:
            caller.close()
            assert accepted.recv(1) == b""
            assert uid_at(accepted) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_peer_that_closed_its_sending_side_is_still_identified(host: str) -> None:
    """Issue 14, row 7: `shutdown(SHUT_WR)` after the request got a 403, 40 times of 40; HeGM answers it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listening,
        socket.create_connection(listening.getsockname()[:2], timeout=HANG_S) as caller,
        listening.accept()[0] as accepted,
    ):
        caller.shutdown(socket.SHUT_WR)
        assert accepted.recv(1) == b""
        assert uid_at(accepted) == os.geteuid()


def test_a_request_whose_sender_had_closed_its_side_was_refused(served: rest.Server) -> None:
    """Issue 14, row 7."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S) as connection:
        connection.sendall(b"POST /resume HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        output = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b" 200 " in output.splitlines()[0]


def test_the_interface_also_listens_on_ipv6(tmp_path: Path) -> None:
    server = rest.serve(_control(tmp_path), "::1", 0, None)
    try:
        with socket.create_connection(("::1", server.port), timeout=HANG_S) as connection:
            connection.sendall(b"POST /resume HTTP/1.0\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.0 200"
    finally:
        server.close()


def test_a_port_in_use_is_not_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert rest.serve_beside(_control(tmp_path), "127.0.0.1", port, None) is None
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"[HeGM] WARNING -- control API server not started (port {port}): ")
