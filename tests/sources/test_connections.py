"""Connections: proxies of the environment, credentials of `.netrc`, interim answers, the exit."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from hypothesis import HealthCheck, given, settings, strategies as st
from serving import Server, own, refuse

import mfload
from mfload import errors
from mfload.sources import client as connections, http

SECRET = "s3cr3t"
MODEL = {"w": np.arange(40_000, dtype=np.float32), "b": np.arange(5)}
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "request_method")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxies and no `.netrc` of the user's, and short pauses."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "no netrc"))
    monkeypatch.setattr(http, "_PAUSE", 0.001)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("m") / "m", MODEL).read_bytes()


@pytest.fixture
def server(raw: bytes) -> Iterator[Server]:
    with serving.serving({"/model.safetensors": raw}) as served:
        yield served


class Proxy(BaseHTTPRequestHandler):
    """Forwards what it is asked, if it is asked with the right user and password."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str]]
    guard: str | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def admitted(self) -> bool:
        self.asked.append((self.command, self.path))
        if self.guard is None or self.headers.get("Proxy-Authorization") == self.guard:
            return True
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_GET(self) -> None:
        if not self.admitted():
            return
        host, _, rest = self.path.partition("://")[2].partition("/")
        name, _, port = host.partition(":")
        with socket.create_connection((name, int(port))) as onward:
            sent = {k: v for k, v in self.headers.items() if not k.startswith("Proxy-")}
            assert sent["Host"] == host
            head = "".join(f"{k}: {v}\r\n" for k, v in sent.items())
            said = f"GET /{rest} HTTP/1.1\r\n{head}Connection: close\r\n\r\n"
            onward.sendall(said.encode())
            while part := onward.recv(1 << 16):
                self.wfile.write(part)
        self.close_connection = True

    def do_CONNECT(self) -> None:
        if not self.admitted():
            return
        name, _, port = self.path.partition(":")
        with socket.create_connection((name, int(port))) as onward:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: onward, onward: self.connection}
            while True:
                for each in select.select([*ends], [], [], 10)[0]:
                    if not (part := each.recv(1 << 16)):
                        self.close_connection = True
                        return
                    ends[each].sendall(part)


@pytest.fixture
def proxy() -> Iterator[Any]:
    """The class of a proxy that runs, with its `port`."""
    made: Any = type("Own", (Proxy,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as running:
        running.daemon_threads, running.block_on_close = True, False
        made.port = running.server_address[1]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        running.shutdown()
        thread.join()


def load(url: str, **options: Any) -> Any:
    return mfload.load(url, "numpy", options=mfload.Options(timeout=20, **options))


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_proxy(server: Server, proxy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also for loopback, as with `requests`."""
    monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    samples.assert_same(load(server.url(), headers={"Authorization": SECRET}), MODEL)
    assert {*proxy.asked} == {("GET", server.url())}
    assert {each.authorization for each in server.asked} == {SECRET}


def test_a_tunnel(
    raw: bytes, proxy: Any, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy learns the host alone; the certificate is the server's."""
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")
    with serving.serving({"/model.safetensors": raw}, own(certificates, "seed")) as server:
        samples.assert_same(load(server.url(), ca_file=certificates / "ca.pem"), MODEL)
        assert {*proxy.asked} == {("CONNECT", f"127.0.0.1:{server.port}")}


def test_a_proxy_that_asks_for_a_password(
    server: Server, proxy: Any, certificates: Path, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.guard = connections._basic("me:a/b")
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://me:a%2Fb@127.0.0.1:{proxy.port}")
    samples.assert_same(load(server.url()), MODEL)
    with serving.serving({"/model.safetensors": raw}, own(certificates, "seed")) as secured:
        trusted = {"ca_file": certificates / "ca.pem"}
        samples.assert_same(load(secured.url(), **trusted), MODEL)
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://me:{SECRET}@127.0.0.1:{proxy.port}")
        with pytest.raises(errors.SourcePermissionError, match="proxy refuses access") as info:
            load(server.url("/model.safetensors?again"))
        assert SECRET not in str(info.value)
        seen = len(proxy.asked)
        with pytest.raises(errors.ReadError, match=f"the proxy 127.0.0.1:{proxy.port}: .*407"):
            load(secured.url("/model.safetensors?again"), **trusted)
        assert len(proxy.asked) == seen + 1  # It does not help to ask again.


def test_a_proxy_that_quotes_what_it_was_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "TRIES", 2)

    def quoted(handler: Any) -> None:
        handler.send_response(502, f"no way for {SECRET}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(serving.Handler, "do_CONNECT", quoted, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"//u:{SECRET}@127.0.0.1:{server.port}")
    with pytest.raises(errors.ReadError, match="Tunnel connection failed: 502 Bad Gateway") as info:
        load("https://host.example/m.safetensors")
    assert SECRET not in str(info.value) + caplog.text


def test_a_proxy_is_told_the_url_as_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed URL counts the `Host`, which has the port if it is not the usual one."""
    seen: list[tuple[str, str]] = []

    def told(handler: Any) -> bool:
        seen.append((handler.path, handler.headers["Host"]))
        return refuse(404)(handler)

    with serving.serving({}) as server:
        server.always = told
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
        hosts = ("host.example", "host.example:8080", "[fd00::7]")
        for host in hosts:
            with pytest.raises(errors.SourceNotFoundError):
                load(f"http://{host}/m.safetensors")
    assert seen == [(f"http://{host}/m.safetensors", host) for host in hosts]


def test_a_proxy_that_is_gone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TRIES", 2)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with pytest.raises(errors.ReadError, match=r"through the proxy 127\.0\.0\.1:1: .*refused"):
        load(server.url())
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    samples.assert_same(load(server.url()), MODEL)


@pytest.mark.parametrize("value", [
    f"socks5://u:{SECRET}@host:1080", f"https://u:{SECRET}@host", "http://", "http://[::1", "http://h:x",
    f"http://u:1@{SECRET}#@host:80", f"http://{SECRET}?@host", f"u/{SECRET}@host",
])  # fmt: skip
def test_proxies_that_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", value)
    with pytest.raises(errors.UsageError, match="in the environment can't be used") as info:
        load(server.url())
    assert SECRET not in str(info.value)
    assert not server.asked


_HOSTS = (
    "a.example",
    "b.a.example",
    "xa.example",
    "10.0.0.7",
    "10.1.0.7",
    "localhost",
    "127.0.0.1",
)
_EXCEPTED = (
    *_HOSTS, ".a.example", "a.example:8080", "10.0.0.0/16", "10.0.0.7/32", "127.0.0.0/8", "*", "",
)  # fmt: skip


@given(
    host=st.sampled_from(_HOSTS),
    port=st.sampled_from([None, 8080]),
    scheme=st.sampled_from(["http", "https"]),
    values=st.dictionaries(
        st.sampled_from(["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY",
                         "all_proxy"]),
        st.sampled_from(["http://p1:1", "p2.example:2", "http://p3", "http://u:p%40@p4:4", ""]),
    ),
    excepted=st.lists(st.sampled_from(_EXCEPTED), max_size=3),
    lower=st.booleans(),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_proxy_is_that_of_requests(
    host: str, port: int | None, scheme: str, values: dict[str, str], excepted: list[str],
    lower: bool,
) -> None:  # fmt: skip
    """For hosts that only end like an exception, `requests` takes the exception too; we don't."""
    requests: Any = pytest.importorskip("requests")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        if excepted:
            patch.setenv("no_proxy" if lower else "NO_PROXY", ",".join(excepted))
        url = f"{scheme}://{host}" + ("" if port is None else f":{port}")
        reference = requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url))
        target = http.RequestTarget.of(url)
        found = connections.proxy_of(*target[:3])
        if host == "xa.example" and "a.example" in ",".join(excepted):
            return
        if not reference:
            assert found is None
            return
        expected = requests.utils.prepend_scheme_if_needed(reference, "http")
        assert found is not None
        bare = expected.rpartition("@")[2].removeprefix("http://")
        assert str(found) == (bare if ":" in bare else f"{bare}:80")
        sent = requests.adapters.HTTPAdapter().proxy_headers(expected)
        assert found.headers == sent


def test_peers_are_read_directly(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    with mfload.publish(MODEL, model="m", peer=mfload.PeerOptions(transports=("http",))) as seed:
        samples.assert_same(mfload.load(seed.url, "numpy"), MODEL)
    assert not proxy.asked


def test_networks_of_the_sixth_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://p")
    monkeypatch.setenv("NO_PROXY", "fd00::/8, [::1]")
    assert connections.proxy_of("http", "fd00::7", 80) is None
    assert connections.proxy_of("http", "::1", 8080) is None
    assert connections.proxy_of("http", "fe00::7", 80) is not None


def test_a_web_server_that_is_told_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CGI script HTTP_PROXY is a header that a client sent."""
    monkeypatch.setenv("HTTP_PROXY", "http://p")
    monkeypatch.setenv("REQUEST_METHOD", "GET")
    assert connections.proxy_of("http", "host", 80) is None


@pytest.mark.parametrize("text", [
    "nonsense", "machine a login b password c\nnonsense", "\xff\xfe",
    "machine 127.0.0.1 login b passwort c",
])  # fmt: skip
def test_a_netrc_with_an_odd_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It stops no URL: as with `requests`, no credentials are taken from it."""
    path = tmp_path / "netrc"
    path.write_bytes(f"{text} {SECRET}".encode("latin-1"))
    monkeypatch.setenv("NETRC", os.fspath(path))
    caplog.set_level(logging.WARNING)
    samples.assert_same(load(server.url()), MODEL)
    assert {each.authorization for each in server.asked} == {None}
    assert f"no credentials are taken from {path}" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [100, 102, 103, 199])
@pytest.mark.parametrize("count", [1, 3])
def test_interim_answers(server: Server, status: int, count: int) -> None:
    said = f"HTTP/1.1 {status} Soon\r\nLink: </x>; rel=preload\r\n\r\n".encode()

    def early(handler: Any) -> None:
        handler.wfile.write(said * count)

    server.always = early
    samples.assert_same(load(server.url()), MODEL)
    assert len({each.connection for each in server.asked}) == 1


@pytest.mark.parametrize("status", [100, 103])
def test_interim_answers_for_ever(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(http, "TRIES", 2)

    def early(handler: Any) -> bool:
        handler.wfile.write(b"HTTP/1.1 %d Soon\r\n\r\n" % status * 200)
        return refuse(404)(handler)

    server.always = early
    with pytest.raises(errors.ReadError, match="no answer but interim ones"):
        load(server.url())


@pytest.mark.parametrize("how", ["", "builtins.held = (mfload.sources.http, opened)"])
def test_the_interpreter_ends_in_silence(server: Server, how: str) -> None:
    code = f"""
import builtins, mfload
import mfload.sources.http
opened = mfload.open({server.url()!r})
opened.get_tensor("w"), opened.get_slice("w")[3:5]
{how}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ended.stdout == ""


@pytest.mark.parametrize(
    "answer",
    [
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nno length\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"Content-Length: 9\r\n\r\nhello",
    ],
)
def test_the_connection_of_a_broken_answer_is_not_used_again(answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(1 << 16)
            accepted.sendall(b"HTTP/1.1 200 OK\r\n" + answer)
            if b"no length" not in answer:
                return
            accepted.recv(1 << 16)  # The next request, if there is one.

    with listener:
        thread = threading.Thread(target=serve)
        thread.start()
        client = connections.Client(connections.Tls(), 4)
        server = "http", "127.0.0.1", listener.getsockname()[1]
        with (
            pytest.raises(connections.BROKEN),
            client.ask(server, "/", {}, connections.Timeouts(5)) as broken,
        ):
            broken.fill(deque([memoryview(bytearray(9))]), 9)
        assert client.waiting(server) is None
        client.close()
        thread.join(10)
    assert not thread.is_alive()
