"""The command `mfload`. Its libraries are an extra, so this module needs none of them."""

from __future__ import annotations

import importlib.util
import sys

from mfload.cli import terminal


def main() -> int:
    """Runs the command with the arguments of the process, and gives the exit code."""
    try:
        terminal.open_streams()
        for module in ("typer", "rich"):
            if importlib.util.find_spec(module) is None:
                install = "pip install 'mfload[cli]'"
                terminal.say(f"mfload: error: the command needs {module}: {install}")
                return 5
        from mfload.cli.running import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # While it starts; `run` handles a later one.
        return 130
