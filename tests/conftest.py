"""What all tests share: files made by the reference writer, and a look at leaks after each."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from leaks import left

pytest.register_assert_rewrite(
    "conformance.suite",
    "conformance.export",
    "conformance.device_memory",
    "conformance.ondemand",
    "conformance.peers",
    "devices.fake",
)
hypothesis.settings.register_profile("ci", max_examples=60, deadline=None, derandomize=False)
hypothesis.settings.register_profile("slow", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("slow" if os.environ.get("MFLOAD_SLOW") else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("MFLOAD_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="broad run: MFLOAD_SLOW=1 runs it"))


def pytest_collection_finish() -> None:
    """What is there by now stays. Else each of many looks for garbage goes through all of it."""
    gc.collect()
    gc.freeze()


# Under `nohup make test &` SIGINT and SIGHUP are ignored, and processes inherit that: tests of them
# start some that would never hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_jax_beside_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's threads make a fork in any later test of the process a warning, and so a failure."""
    before = "jax" in sys.modules
    yield
    apart = {"frameworks", "meshes"} & set(request.path.parts)
    assert before or apart or "jax" not in sys.modules, "JAX wants a process of its own"


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """What ends a process does so after a test as before: a handler left for SIGTERM makes a pool
    of forked workers in any later test wait for ever, once in some hundred times."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    after = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if after[number] != handler:  # Later tests are not to suffer for this one.
            signal.signal(number, handler)
    assert after == before


@pytest.fixture(autouse=True)
def no_bytes_live() -> Iterator[None]:
    """After every test, none of mfload's memory is left, on the host or on a device."""
    yield
    assert left() == 0


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with certificates of a seed, a reader and an expired seed; a stranger."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        run("req", "-x509", "-days", "2", *curve, *subject)
    names = {"seed": "IP:127.0.0.1", "reader": "DNS:reader", "other": "DNS:elsewhere", "old": ""}
    for name, other in names.items():
        run("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "request")
        (folder / "extensions").write_text(f"subjectAltName={other or 'IP:127.0.0.1'}\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem")
        days = "-1" if name == "old" else "2"
        run("x509", "-req", "-in", "request", "-days", days, *signed, "-extfile", "extensions")
    return folder
