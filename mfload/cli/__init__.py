"""The command `mfload`. Its libraries are an extra, so this module needs none of them."""

from __future__ import annotations

import importlib.util
import sys

from mfload.cli import streams

COMMAND = "pip install 'mfload[cli]'"
MISSING = 5
"""Exit code where something that is needed is not installed."""
INTERRUPTED = 130


def main() -> int:
    """Runs the command with the arguments of the process.

    Returns:
        The exit code (`mfload.cli.exits` lists them).
    """
    try:
        streams.fill()
        for module in ("typer", "rich"):
            if importlib.util.find_spec(module) is None:
                streams.say(f"mfload: error: the command needs {module}: {COMMAND}")
                return MISSING
        from mfload.cli.app import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # While it starts; later on it is taken care of there.
        return INTERRUPTED
