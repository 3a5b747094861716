"""``python -m oxccl`` is the ``oxccl`` command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from oxccl import _isolate, _oxccl


def main() -> None:
    """Runs the command with this process's arguments and ends the process with its exit code."""
    # The command has handlers of its own, and ends by the signal where it has none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(FileNotFoundError):
        # The children of isolated groups are a program, and this one is the interpreter.
        helper = _isolate.helper()
        if helper is not None:
            os.environ["OXCCL_ISOLATE_HELPER"] = helper
    again = [sys.executable, "-m", "oxccl"]
    sys.exit(_oxccl._command(["oxccl", *sys.argv[1:]], again))


if __name__ == "__main__":
    main()
