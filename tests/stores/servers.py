"""Real stores on loopback, each started by its binary and ended with the tests.

The fixtures are in `conftest.py`. A server that is not installed is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

KEY, SECRET = "access-key-of-tests", "secret-key-of-tests"
BUCKET = "weights"
READY = 60.0  # Seconds that a server has to come up.


class Store(NamedTuple):
    """A store that speaks S3, with an empty bucket."""

    kind: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """What `Options(store=)` takes."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def client(self, bucket: str = BUCKET) -> Any:
        """The bucket, by obstore."""
        import obstore.store

        return obstore.store.S3Store(bucket, **self.options, client_options={"allow_http": True})

    def put(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.client(), key, data)

    def put_tree(self, directory: Path, prefix: str) -> None:
        """Uploads all files of a directory."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())

    def url(self, key: str = "") -> str:
        return f"s3://{BUCKET}/{key}"


def binary(*names: str, variable: str = "") -> str:
    """The path of a program, beside Python or on PATH; skips the test if there is none."""
    beside = os.path.dirname(sys.executable)
    for name in names:
        found = os.environ.get(variable) or shutil.which(name, path=beside) or shutil.which(name)
        if found:
            return found
    pytest.skip(f"{names[0]} is not installed")


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, nor 10,000 above, where some servers add a second one."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.ExitStack() as held:
            first, second = (held.enter_context(socket.socket()) for _ in range(2))
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                if port not in found and port < 55_000:
                    second.bind(("127.0.0.1", port + 10_000))
                    found.append(port)
    return found


@contextlib.contextmanager
def started(
    command: Sequence[str],
    ready: Callable[[], object],
    directory: Path,
    **environment: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server until the end of the block, once `ready` raises nothing."""
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command], cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, ready, log)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Some are a script around the server.
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + READY
    while True:
        try:
            ready()
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > end:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the server did not come up: {error!r}\n{tail}") from error
            time.sleep(0.1)


def _bucket_ready(store: Store) -> Callable[[], object]:
    """Makes the bucket, and sees that it takes an object."""

    def ready() -> None:
        import boto3
        from botocore.config import Config

        config = Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1})
        s3 = boto3.client(
            "s3", endpoint_url=store.endpoint, aws_access_key_id=KEY,
            aws_secret_access_key=SECRET, region_name="us-east-1", config=config,
        )  # fmt: skip
        held = (s3.exceptions.BucketAlreadyOwnedByYou, s3.exceptions.BucketAlreadyExists)
        with contextlib.suppress(*held):
            s3.create_bucket(Bucket=BUCKET)
        s3.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
        s3.delete_object(Bucket=BUCKET, Key="ready")
        s3.close()

    return ready


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[Store]:
    program = binary("moto_server")
    store = Store("moto", *free_ports(1))
    command = [program, "-H", "127.0.0.1", "-p", str(store.port)]
    with started(command, _bucket_ready(store), directory):
        yield store


@contextlib.contextmanager
def weed(directory: Path) -> Iterator[Store]:
    """SeaweedFS: a store of disks, which checks signatures."""
    program = binary("weed")
    master, volume, filer, s3 = free_ports(4)
    store = Store("weed", s3)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    reader = {
        "name": "other",
        "credentials": [{"accessKey": "other-key-of-tests", "secretKey": "other-secret"}],
        "actions": ["Read:elsewhere"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
    command = [
        program, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}",
        "-s3", f"-s3.port={s3}", "-s3.config=s3.json", "-s3.iam=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20", "-master.volumeSizeLimitMB=256",
    ]  # fmt: skip
    with started(command, _bucket_ready(store), directory):
        yield store


@contextlib.contextmanager
def rclone(directory: Path) -> Iterator[Store]:
    """A directory behind S3; it answers a range with status 200."""
    program = binary("rclone")
    store = Store("rclone", *free_ports(1))
    (directory / "served").mkdir()
    command = [
        program, "serve", "s3", str(directory / "served"), "--addr", f"127.0.0.1:{store.port}",
        "--auth-key", f"{KEY},{SECRET}",
    ]  # fmt: skip
    nothing = str(directory / "rclone.conf")
    with started(command, _bucket_ready(store), directory, RCLONE_CONFIG=nothing):
        yield store
