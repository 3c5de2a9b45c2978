"""Who has the other end of a connection, as the kernel says."""

from __future__ import annotations

import os
import socket

import pytest
from seeding import SeedProcess, options

import mfload
from mfload import errors
from mfload.peer import connections
from mfload.sources.client import on_this_machine


@pytest.mark.parametrize(
    ("bound", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
        ("::", "::ffff:127.0.0.1"),
    ],
)
def test_the_other_end(bound: str, asked: str) -> None:
    """By either protocol, and one within the other; no end that is closed, and no listener."""
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host in (bound, asked)]
    try:
        listener = socket.create_server(
            (bound, 0), family=families[0], dualstack_ipv6=bound == "::"
        )
    except OSError:
        pytest.skip("there is no such protocol")
    with listener, socket.socket(families[1]) as client:
        client.connect((asked, listener.getsockname()[1]))
        served, _ = listener.accept()
        ends = client.getsockname(), client.getpeername()
        with served:
            assert connections.at_other_end(*ends) == os.fstat(served.fileno()).st_ino
            assert connections.at_other_end(*reversed(ends)) == os.fstat(client.fileno()).st_ino
            other = ends[0][0], 1, *ends[0][2:]
            assert connections.at_other_end(other, ends[1]) is None
        client.close()
        assert connections.at_other_end(*ends) is None


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is not read then, and another transport is taken."""
    monkeypatch.setattr(connections, "_SOCK_DIAG", 99)
    seed = SeedProcess()
    try:
        with pytest.raises(errors.SourceError, match="memory: the kernel does not tell of conn"):
            mfload.load(seed.url, "numpy", options=options("memory"))
        report = mfload.Report()
        mfload.load(seed.url, "numpy", options=options(), report=report)
        assert report.route[0][1] == "peer-memfd"
    finally:
        seed.end()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_each_loopback_address_is_this_machine(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as reader,
    ):
        assert on_this_machine(reader)
