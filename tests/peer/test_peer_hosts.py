"""Several hosts, in network namespaces, of which one is cut off."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from seeding import weights

UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--kill-child"]


def refusal() -> str:
    """Why there are no namespaces here; empty if there are."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "needs the commands unshare and ip"
    check = "mount -t tmpfs none /run && ip netns add x && ip link add y type bridge"
    done = subprocess.run([*UNSHARE, "sh", "-c", check], capture_output=True, check=False)
    return "" if done.returncode == 0 else f"no network namespaces: {done.stderr!r}"


@pytest.mark.parametrize("what", ["several", "in_the_middle", "by_a_planner"])
def test_hosts(what: str, tmp_path: Path) -> None:
    if reason := refusal():
        pytest.skip(reason)
    arrays = weights()
    files = samples.save(tmp_path / "model.safetensors", arrays)
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))
    token = tmp_path / "token"
    token.write_text("a-token-of-the-network")
    given = json.dumps({"token_file": str(token)})
    script = str(Path(__file__).with_name("hosts.py"))
    run = [*UNSHARE, sys.executable, script, what, given, str(files), digest.hexdigest()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
