"""The program that children of isolated groups run."""

from __future__ import annotations

import os
import sys
import sysconfig

from oxccl import _oxccl

_PROGRAM = "oxccl-isolated-child"


def helper() -> str | None:
    """The path of the program; ``None`` if ``OXCCL_ISOLATE_HELPER`` names one."""
    if os.environ.get("OXCCL_ISOLATE_HELPER"):
        return None
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    for folder in folders:
        path = os.path.join(folder, _PROGRAM)
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        f"{_PROGRAM}, which comes with this package, is not in {' or '.join(folders)}; "
        "name a helper program in OXCCL_ISOLATE_HELPER, such as the oxccl command"
    )


def child() -> None:
    """Serves as the child of an isolated group."""
    _oxccl._run_child_if_asked()
    sys.exit(f"{_PROGRAM} is started by isolated groups, not by hand")
