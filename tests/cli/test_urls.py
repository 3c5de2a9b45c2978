"""The commands take URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import serving
from conftest import Run

SECRET = "s3cr3t"


@pytest.fixture
def url() -> Iterator[str]:
    with serving.serving(_files()) as served:
        yield served.url()


def _files() -> dict[str, bytes]:
    from safetensors.numpy import save

    return {"/model.safetensors": save({"w": np.arange(6, dtype=np.float32)})}


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
def test_commands(run: Run, url: str, command: str) -> None:
    ran = run(command, f"{url}?token={SECRET}")
    assert ran.code == 0
    assert SECRET not in ran.out + ran.err
    assert "1 tensor" in ran.out or "1 numpy tensor" in ran.out


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
def test_what_is_not_there(run: Run, url: str, command: str) -> None:
    ran = run(command, f"{url}x?token={SECRET}")
    assert ran.code == 3
    assert "no such file on the server" in ran.err
    assert SECRET not in ran.out + ran.err


def test_what_reads_local_files_alone(run: Run, url: str) -> None:
    ran = run("load", url, "--engine", "mmap")
    assert ran.code == 2
    assert "local files" in ran.err
    assert run("bench", url).code == 2
    ran = run("doctor", url)
    assert ran.code in (0, 1)
    assert "please report" not in ran.out


def _guarded(handler: serving.Handler) -> bool:
    if handler.headers.get("Authorization") == f"Bearer {SECRET}":
        return False
    handler.plain(401)
    return True


@pytest.mark.parametrize("command", ["ls", "plan", "load", "verify"])
def test_headers(run: Run, tmp_path: Path, command: str) -> None:
    secret = tmp_path / "headers"
    secret.write_text(f"Authorization: Bearer {SECRET}\nX-Other: 1\n\n")
    with serving.serving(_files(), always=_guarded) as served:
        ran = run(command, served.url())
        assert ran.code == (1 if command == "verify" else 3)
        assert "--header HEADER or ~/.netrc" in ran.out + ran.err
        for given in (f"Authorization: Bearer {SECRET}", f"@{secret}"):
            ran = run(command, served.url(), "--header", given, "--header", "X-More: 2")
            assert ran.code == 0, ran.err
            assert SECRET not in ran.out + ran.err


@pytest.mark.parametrize("wrong", ["Authorization", f"Range: {SECRET}", f"A: {SECRET}\nb", "@no"])
def test_headers_that_are_none(run: Run, url: str, wrong: str) -> None:
    ran = run("ls", url, "--header", wrong)
    assert ran.code in (2, 3)
    assert SECRET not in ran.err


@pytest.mark.parametrize("wrong", [
    f"Bearer {SECRET}: x", f"user u password {SECRET}:x", f"A: {SECRET}" + "x" * (1 << 16),
])  # fmt: skip
def test_files_that_hold_no_headers(run: Run, url: str, tmp_path: Path, wrong: str) -> None:
    """What is longer than can be read is not sent in part."""
    (tmp_path / "headers").write_text(wrong)
    ran = run("ls", url, "--header", f"@{tmp_path / 'headers'}")
    assert ran.code == 2
    assert SECRET not in ran.err


def test_headers_of_other_editors(run: Run, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"\ufeffAuthorization: Bearer {SECRET}\r\n", "utf-8")
    with serving.serving(_files(), always=_guarded) as served:
        ran = run("ls", served.url(), "--header", f"@{tmp_path / 'headers'}")
        assert ran.code == 0, ran.err


def test_a_private_authority(run: Run, certificates: Path) -> None:
    with serving.serving(_files(), serving.own(certificates, "seed")) as served:
        ca = certificates / "ca.pem"
        assert run("ls", served.url(), "--ca-file", ca).code == 0
        ran = run("ls", served.url())
        assert ran.code == 3
        assert "--ca-file" in ran.err
        ran = run("ls", served.url().replace("https", "http"))
        assert ran.code == 3
        assert "the server speaks TLS" in ran.err
        both = serving.own(certificates, "seed") | {"ca_file": ca}
    with serving.serving(_files(), both) as served:
        given = serving.own(certificates, "reader")
        more = ("--cert-file", given["cert_file"], "--key-file", given["key_file"])
        assert run("ls", served.url(), "--ca-file", ca, *more).code == 0
        assert run("ls", served.url(), "--ca-file", ca).code == 3
