"""Stores for all tests of this folder; each is started when a test asks for it first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import servers


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Store]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as store:
        yield store


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Store]:
    with servers.weed(tmp_path_factory.mktemp("weed")) as store:
        yield store


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Store]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as store:
        yield store


@pytest.fixture(scope="session", params=["moto", "weed", "rclone"])
def store(request: pytest.FixtureRequest) -> servers.Store:
    """Each store that speaks S3."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see no credentials but their own, and no other machine."""
    import os

    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
