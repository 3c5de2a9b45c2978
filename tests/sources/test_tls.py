"""Servers with certificates of a private authority, and URLs that say the wrong scheme."""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from serving import own

import mfload
from mfload import errors
from mfload.options import started
from mfload.sources import http, tls

MODEL = {"w": np.arange(6, dtype=np.float32)}


@pytest.fixture
def files() -> dict[str, bytes]:
    from safetensors.numpy import save

    return {"/model.safetensors": save(MODEL)}


@pytest.fixture
def secured(files: dict[str, bytes], certificates: Path) -> Iterator[serving.Server]:
    with serving.serving(files, own(certificates, "seed")) as server:
        yield server


def load(url: str, **how: Any) -> Any:
    return mfload.load(url, "numpy", options=mfload.Options(timeout=20, **how))


def test_a_private_authority(secured: serving.Server, certificates: Path) -> None:
    samples.assert_same(load(secured.url(), ca_file=certificates / "ca.pem"), MODEL)
    for how in ({}, {"ca_file": certificates / "stranger.pem"}):
        with pytest.raises(errors.ReadError, match="certificate") as info:
            load(secured.url(), **how)
        assert "ca_file=" in str(info.value.expected)
        assert "SSL_CERT_FILE" in str(info.value.expected)
        assert info.value.found == "given up after 1 try"


def test_the_environment_names_one(
    secured: serving.Server, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    samples.assert_same(load(secured.url()), MODEL)


def test_connections_are_kept_for_one_authority_alone(
    secured: serving.Server, certificates: Path
) -> None:
    with mfload.open(
        secured.url(), "numpy", options=mfload.Options(ca_file=certificates / "ca.pem")
    ) as opened:
        assert list(opened.keys()) == ["w"]
        with pytest.raises(errors.ReadError, match="certificate"):
            load(secured.url())


def test_a_server_that_asks_for_a_certificate(files: dict[str, bytes], certificates: Path) -> None:
    ca = {"ca_file": certificates / "ca.pem"}
    with serving.serving(files, own(certificates, "seed") | ca) as server:
        samples.assert_same(load(server.url(), **own(certificates, "reader"), **ca), MODEL)
        with pytest.raises(errors.SourceError):
            load(server.url(), **ca)


def test_another_process_has_the_same_certificates(
    secured: serving.Server, certificates: Path
) -> None:
    options = mfload.Options(ca_file=certificates / "ca.pem")
    source = http.open_url(secured.url(), started(options))
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.size == source.size


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_files_that_hold_no_certificate(secured: serving.Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(errors.UsageError, match="certificate") as info:
        load(secured.url(), ca_file=tmp_path / name)
    assert name in str(info.value)


def test_a_key_with_a_passphrase_is_refused_without_asking(
    secured: serving.Server, certificates: Path, tmp_path: Path
) -> None:
    key = tmp_path / "locked.key"
    made = ["openssl", "ec", "-in", certificates / "reader.key", "-aes128", "-passout", "pass:word"]
    subprocess.run([*made, "-out", key], check=True, capture_output=True)
    with pytest.raises(errors.UsageError, match="certificate") as info:
        load(secured.url(), cert_file=certificates / "reader.pem", key_file=key)
    assert info.value.found == "the key has a passphrase"
    assert str(key) in str(info.value.file)


@pytest.mark.parametrize("name", ["ca_file", "cert_file"])
@pytest.mark.parametrize("options", [mfload.Options, mfload.PeerOptions])
def test_what_is_no_path(options: Any, name: str) -> None:
    for wrong in (5, ["x"], b"x"):
        with pytest.raises(errors.UsageError, match=f"{name} is not a path"):
            options(**{name: wrong})


def test_a_key_without_its_certificate() -> None:
    with pytest.raises(errors.UsageError, match="key_file= has no certificate"):
        mfload.Options(key_file="x")


def test_peers_take_those_of_the_options() -> None:
    made = mfload.Options(ca_file="ca", cert_file="cert", key_file="key")
    assert made.peer == mfload.PeerOptions(ca_file="ca", cert_file="cert", key_file="key")
    given = mfload.PeerOptions(planner="http://host:1", ca_file="theirs")
    assert mfload.Options(ca_file="ca", peer=given).peer == given
    assert mfload.Options().peer is None


def test_http_where_the_server_speaks_tls(secured: serving.Server) -> None:
    url = secured.url().replace("https:", "http:")
    with pytest.raises(errors.SourceError, match="the server speaks TLS") as info:
        load(url)
    assert str(info.value.expected).startswith("https://")
    assert str(info.value.found).startswith("http://")


def test_https_where_it_does_not(files: dict[str, bytes]) -> None:
    with serving.serving(files) as server:
        url = server.url().replace("http:", "https:")
        with pytest.raises(errors.SourceError, match="the server speaks plain HTTP") as info:
            load(url)
    assert str(info.value.expected).startswith("http://")


def test_tls_servers_that_answer_to_plain_http_too(certificates: Path) -> None:
    """As nginx does, to tell that TLS is needed."""
    context = tls.Tls(**own(certificates, "seed")).context(server=True)

    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), connection:
                    if connection.recv(1, socket.MSG_PEEK) == b"\x16":
                        with context.wrap_socket(connection, server_side=True) as secured:
                            secured.recv(1)
                    else:
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        try:
            with pytest.raises(errors.ReadError, match="certificate verify failed"):
                load(f"https://127.0.0.1:{listener.getsockname()[1]}/model.safetensors")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_what_breaks_off_is_not_taken_for_tls(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    with (
        serving.serving(files, always=serving.cut(3)) as server,
        pytest.raises(errors.ReadError, match="ended before"),
    ):
        load(server.url())


def test_nothing_is_said_of_what_answers_to_neither() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.close()
        for ours in (True, False):
            assert tls.mismatch(ConnectionResetError(), "127.0.0.1", port, tls=ours) is None


def test_a_seed_with_certificates(certificates: Path) -> None:
    pytest.importorskip("xxhash")
    if sys.platform != "linux":
        pytest.skip("seeds need Linux")
    peer = mfload.PeerOptions(**own(certificates, "seed"))
    with mfload.publish(MODEL, model="m", peer=peer) as seed:
        samples.assert_same(load(seed.url, ca_file=certificates / "ca.pem"), MODEL)
        with pytest.raises(errors.SourceError, match="the peer speaks TLS") as info:
            load(seed.url)
        assert "ca_file=" in str(info.value.expected)
        with pytest.raises(errors.SourceError, match="no secure connection") as info:
            load(seed.url, ca_file=certificates / "stranger.pem")
        assert "ca_file=" in str(info.value.expected)
    with (
        mfload.publish(MODEL, model="m") as seed,
        pytest.raises(errors.SourceError, match="the peer speaks plain HTTP") as info,
    ):
        load(seed.url, ca_file=certificates / "ca.pem")
    assert info.value.expected == "no ca_file="
