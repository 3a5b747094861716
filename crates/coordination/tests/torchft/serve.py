"""Serves torchft's own classes to a test in another language: one JSON request a line in, one JSON answer a line out.

Requests: {"id": 1, "new": "ManagerClient", "as": "name", "with": {...}}, {"id": 2, "on": "name", "call": "method", "with": {...}}.
Arguments that end in timeout or interval are seconds. Every request has a thread of its own; answers come as they end:
{"id": 2, "ok": ...} or {"id": 2, "error": "TimeoutError: ..."}. torchft prints its log on stdout as well: whatever is not JSON is log.
The extension module is loaded without the torchft package, which would import torch.
"""
import glob
import importlib.util
import json
import sys
import threading
from datetime import timedelta

found = glob.glob(sys.argv[1] + "/**/_torchft*.so", recursive=True)
spec = importlib.util.spec_from_file_location("_torchft", found[0])
torchft = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torchft)

objects = {}
printing = threading.Lock()


def arguments(request):
    return {
        name: timedelta(seconds=value) if name.endswith(("timeout", "interval")) else value
        for name, value in request["with"].items()
    }


def plain(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    fields = [name for name in dir(value) if not name.startswith("_")]
    return {name: plain(getattr(value, name)) for name in fields}


def serve(request):
    try:
        if "new" in request:
            objects[request["as"]] = getattr(torchft, request["new"])(**arguments(request))
            answer = {"ok": None}
        else:
            answer = {"ok": plain(getattr(objects[request["on"]], request["call"])(**arguments(request)))}
    except BaseException as error:  # torchft's panics are BaseExceptions
        answer = {"error": f"{type(error).__name__}: {error}"}
    with printing:
        print("\n" + json.dumps({"id": request["id"], **answer}), flush=True)


for line in sys.stdin:
    threading.Thread(target=serve, args=(json.loads(line),), daemon=True).start()
