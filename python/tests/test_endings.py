"""How programs end: with operations in flight, with groups dropped in the middle, after a fork. Each many times over."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

import oxccl
from jobs import ends, run, script

TIMES = 20 if os.environ.get("OXCCL_LONG") else 4
"""How often each program runs."""

EXITS = {
    "in_flight": """
world = init()
works = [world.recv(bytearray(800), 1 - rank, n, async_op=True) for n in range(5)]
if rank == 0:
    works.append(world.all_reduce(bytearray(8 << 20), async_op=True))
together()
""",
    "dropped_in_flight": """
world = init()
for n in range(5):
    world.recv(bytearray(800), 1 - rank, n, async_op=True)
world.send(bytearray(8 << 20), 1 - rank, 77, async_op=True)
gc.collect()
together()
""",
    "group_dropped_in_the_middle": """
world = init()
half = world.new_group([0, 1])
works = [g.recv(bytearray(800), 1 - rank, n, async_op=True) for n in range(5) for g in (world, half)]
together()
del world
gc.collect()
del half
gc.collect()
try:
    works[0].wait()
except oxccl.Error as e:
    assert e.kind in ("Aborted", "PeerLost"), e
""",
    "group_dropped_during_a_call": """
world = init()
def call(world):
    try:
        world.recv(bytearray(800), 1 - rank)
    except oxccl.Error:
        pass
threads = [threading.Thread(target=call, args=(world,), daemon=True) for _ in range(3)]
[t.start() for t in threads]
del world
gc.collect()
together()
""",
    "memory_dropped_in_flight": """
world = init()
for n in range(20):
    x = bytearray(8 << 16)
    work = world.all_reduce(x, async_op=True)
    del x, work
    y = bytearray(b'x' * (8 << 16))
    del y
world.barrier()
""",
    "exception": """
world = init()
work = world.recv(bytearray(800), 1 - rank, async_op=True)
together()
sys.exit(work.wait(0))
""",
    "daemon_threads_block": """
world = init()
def call():
    try:
        world.recv(bytearray(800), 1 - rank)
    except oxccl.Error:
        pass
for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
together()
""",
    "awaited": """
import asyncio
world = init()
async def main():
    async def waits(work):
        try:
            await work
        except oxccl.Error:
            pass
    task = asyncio.ensure_future(waits(world.recv(bytearray(24), 1 - rank, async_op=True)))
    await asyncio.sleep(0)
    together()
asyncio.run(main())
""",
    "globals_in_a_cycle": """
world = init()
class Holds: pass
h = Holds(); h.h = h; h.world = world; h.works = [world.recv(bytearray(80), 1 - rank, n, async_op=True) for n in range(3)]
sys.modules["holds"] = h
together()
""",
}

# Daemon threads that never stop calling while the interpreter ends, which takes it a while.
CALLS_ON = """
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)
sys.modules["slow"] = Slow()
{setup}
def calls(n):
    while True:
        try:
            {call}
        except oxccl.Error:
            pass
for n in range(4):
    threading.Thread(target=calls, args=(n,), daemon=True).start()
together()
"""
LENDS = """
world = oxccl.init(address + str(rank), rank=0, world_size=1)
class Lends:
    def __init__(self): self.x = np.zeros(4)
    def __dlpack__(self, **wish):
        for _ in range(100): pass
        return self.x.__dlpack__(**wish)
"""
OWN_STORE = """
class Store:
    def __init__(self): self.held = {}
    def set(self, key, value): self.held[key] = value
    def check(self, keys): return all(key in self.held for key in keys)
    def add(self, key, amount): return amount
    def get(self, key): return self.held[key]
    def wait(self, keys, timeout):
        until = time.monotonic() + min(timeout.total_seconds(), 60)
        while not self.check(keys):
            if time.monotonic() > until: raise TimeoutError(str(keys))
            time.sleep(0.001)
"""
DAEMONS = {
    "collective": ("world = init()", "world.recv(bytearray(800), 1 - rank)"),
    "collective_that_ends": ("world = oxccl.init(address + str(rank), rank=0, world_size=1)", "world.all_reduce(bytearray(800))"),
    "work": ("world = init()", "world.recv(bytearray(800), 1 - rank, 5 + n, async_op=True).wait()"),
    "refused_call": ("world = init()", "world.all_reduce(np.zeros(4)[::2])"),
    "memory_lent_by_python": (LENDS, "world.all_reduce(Lends())"),
    "store": ("store = oxccl.FileStore(address[7:] + 'store')", "store.get('never')"),
    "new_group": ("world = init()", "world.new_group([0, 1])"),
    "store_of_the_program": (OWN_STORE, "oxccl.unconfigured().configure(Store(), 0, 2)"),
    "control_plane": ("lighthouse = oxccl.Lighthouse(min_replicas=2)", "oxccl.LighthouseClient(lighthouse.address).status()"),
    "await": (
        "import asyncio\nworld = init()\nasync def receives(n): await world.recv(bytearray(800), 1 - rank, 5 + n, async_op=True)",
        "asyncio.run(receives(n))",
    ),
}
EXITS |= {f"daemon_threads_call_on_{name}": CALLS_ON.format(setup=setup, call=call) for name, (setup, call) in DAEMONS.items()}


@pytest.mark.parametrize("how", EXITS)
def test_a_program_ends_without_a_crash(how: str, tmp_path: Path) -> None:
    jobs = []
    for n in range(TIMES):
        folder = tmp_path / str(n)
        folder.mkdir()
        jobs.append(script(EXITS[how], 2, folder))
        # Two jobs at once: enough to disturb each other.
        if len(jobs) == 2:
            for ended in ends([p for job in jobs for p in job]):
                status, out, err = ended
                if how == "exception":
                    assert "oxccl._errors." in err
                    status, err = status - 1, ""
                assert (status, out, err) == (0, "", ""), f"run {n}"
            jobs.clear()


FORKS = """
import warnings
warnings.simplefilter("ignore")
world = init()
pending = world.recv(np.zeros(2), 1 - rank, 3, async_op=True)
child = os.fork()
if child == 0:
    calls = [
        lambda: world.all_reduce(np.zeros(1)),
        lambda: world.barrier(async_op=True),
        lambda: world.abort(),
        lambda: world.shutdown(),
        lambda: world.new_group([0]),
        lambda: world.error,
        lambda: pending.wait(),
        lambda: pending.done(),
        lambda: pending.abort(),
        lambda: oxccl.init("file:///nowhere", rank=0, world_size=1),
    ]
    for n, call in enumerate(calls):
        try:
            call()
        except oxccl.Error as e:
            assert e.kind == "InvalidState" and "forked" in str(e) and "spawn" in str(e), (n, e)
        else:
            print("call", n, "was not refused", flush=True)
    del world, pending, call, calls
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
# The child's end did nothing to the group.
x = np.ones(3)
world.all_reduce(x)
world.send(np.ones(2), 1 - rank, 3)
pending.wait()
world.barrier()
print(x[0], world.error)
"""


def test_a_forked_child_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    for n in range(TIMES):
        folder = tmp_path / str(n)
        folder.mkdir()
        assert ends(script(FORKS, 2, folder)) == [(0, "2.0 None\n", "")] * 2, f"run {n}"


KILLED = """
import warnings
warnings.simplefilter("ignore")
world = init()
if rank == 1:
    child = os.fork()
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    print(child, flush=True)
    together()
    os.kill(os.getpid(), signal.SIGKILL)
pending = world.all_reduce(np.ones(4), async_op=True, timeout=60)
together()
since = time.monotonic()
try:
    pending.wait()
except oxccl.PeerLost as e:
    print(e.peer, time.monotonic() - since < 20)
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent(transport: str, tmp_path: Path) -> None:
    survivor, killed = script(KILLED, 2, tmp_path, OXCCL_GLOO_TRANSPORT=transport)
    assert ends([survivor]) == [(0, "1 True\n", "")]
    # The child waits for the end of its input.
    assert killed.stdout is not None
    os.kill(int(killed.stdout.readline()), 0)
    assert ends([killed]) == [(-signal.SIGKILL, "", "")]


def test_a_forked_child_calls_stores_for_itself_and_its_end_leaves_them_alone(tmp_path: Path) -> None:
    body = """
server = oxccl.StoreServer()
stores = [oxccl.TcpStore(server.address), oxccl.FileStore(os.environ["STORE_FILE"])]
for store in stores:
    store.add("count", 1)
child = os.fork()
for _ in range(200):
    for store in stores:
        store.add("count", 1)
        store.set(str(os.getpid()), b"x" * 100)
if child == 0:
    # As the end of a worker does.
    del stores, server
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for store in stores:
    assert store.add("count", 0) == 401, store
    assert store.get(str(child)) == b"x" * 100
print("both")
"""
    [ended] = ends(script(body, 1, tmp_path, STORE_FILE=str(tmp_path / "store")))
    assert ended[:2] == (0, "both\n"), ended


def test_a_child_that_is_forked_before_anything_was_made_has_a_world_of_its_own(tmp_path: Path) -> None:
    text = f"""
child = os.fork()
if child == 0:
    world = oxccl.init("file://{tmp_path}/inner-" + str(rank), rank=0, world_size=1)
    world.barrier()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
init().barrier()
"""
    assert ends(script(text, 2, tmp_path)) == [(0, "", "")] * 2


LEAVES = """
import ctypes
world = init()
# Whatever Python forgets to destroy at its end: the group leaves all the same.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(world))
world.barrier()
if rank == 1:
    try:
        world.recv(bytearray(8), 0, timeout=60)
    except oxccl.PeerLost as e:
        print(e.peer, "left the group" in str(e) or "shut down" in str(e), e)
"""


def test_a_program_that_ends_leaves_its_group_in_good_order(tmp_path: Path) -> None:
    (status, out, err), (other, heard, errors) = ends(script(LEAVES, 2, tmp_path))
    assert (status, out, err, other, errors) == (0, "", "", 0, "")
    assert heard.startswith("0 True"), heard


def leaves(world: oxccl.World) -> str:
    """Rank 1 ends; what rank 0 is told."""
    if world.rank == 1:
        return ""
    with pytest.raises(oxccl.PeerLost) as caught:
        world.recv(bytearray(8), 1)
    return str(caught.value)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_of_multiprocessing_that_ends_leaves_in_good_order(method: str) -> None:
    assert "left the group" in run(2, leaves, context=multiprocessing.get_context(method))[0]
