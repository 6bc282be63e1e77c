"""Every call of a collective is counted once, its whole payload, under its group's name."""

import json
import subprocess
import sys

import pytest
import torch

from aiscale.measure.distributed import counter as flight
from aiscale.measure.distributed.counter import Group
from ranks import run_ranks

CALLS = """
import json, warnings
import torch.distributed._functional_collectives as fc
from torch.distributed.distributed_c10d import _coalescing_manager
warnings.simplefilter("ignore", FutureWarning)
n, r, group = world.size, world.rank, dist.group.WORLD
x = torch.ones(12)
def twice(call):
    with _coalescing_manager():
        call(), call()
def whole(): return torch.empty(12 * n)
def part(): return torch.empty(12 // n)
def gather_list(): return [torch.empty(12) for _ in range(n)]
def exchange():
    to = dist.P2POp(dist.isend, x, (r + 1) % n)
    back = dist.P2POp(dist.irecv, torch.empty(12), (r - 1) % n)
    for work in dist.batch_isend_irecv([to, back]):
        work.wait()
calls = {
    "all_reduce": lambda: dist.all_reduce(x),
    "all_reduce coalesced": lambda: dist.all_reduce_coalesced([x, x]),
    "all_reduce of a coalescing manager": lambda: twice(lambda: dist.all_reduce(x)),
    "all_reduce functional": lambda: fc.all_reduce(x, "sum", group).sum(),
    "all_reduce functional coalesced": lambda: sum(
        t.sum() for t in fc.all_reduce_coalesced([x, x], "sum", group)
    ),
    "all_gather": lambda: dist.all_gather(gather_list(), x),
    "all_gather into tensor": lambda: dist.all_gather_into_tensor(whole(), x),
    "all_gather by its oldest name": lambda: group._allgather_base(whole(), x).wait(),
    "all_gather of a coalescing manager": lambda: twice(
        lambda: dist.all_gather_into_tensor(whole(), x)
    ),
    "all_gather functional": lambda: fc.all_gather_tensor(x, 0, group).sum(),
    "all_gather functional coalesced": lambda: [
        t.sum() for t in fc.all_gather_into_tensor_coalesced([x, x], group)
    ],
    "reduce_scatter of a list": lambda: dist.reduce_scatter(part(), list(x.chunk(n))),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(part(), x),
    "reduce_scatter by its oldest name": lambda: group._reduce_scatter_base(part(), x).wait(),
    "reduce_scatter of a coalescing manager": lambda: twice(
        lambda: dist.reduce_scatter_tensor(part(), x)
    ),
    "reduce_scatter functional": lambda: fc.reduce_scatter_tensor(x, "sum", 0, group).sum(),
    "broadcast": lambda: dist.broadcast(x, 0),
    "broadcast functional": lambda: fc.broadcast(x, 0, group).sum(),
    "reduce": lambda: dist.reduce(x, 0),
    "gather": lambda: dist.gather(x, gather_list() if r == 0 else None, 0),
    "scatter": lambda: dist.scatter(torch.empty(12), gather_list() if r == 0 else None, 0),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty(12), x),
    "all_to_all functional": lambda: fc.all_to_all_single(x, None, None, group).sum(),
    "barrier": lambda: dist.barrier(),
    "batch": exchange,
}
for name, call in calls.items():
    before = world.traffic.groups()
    call()
    found = [(op, g.name, g.ranks, c.calls, c.payload_bytes)
             for (op, g), c in world.traffic.groups_since(before).items()]
    if r == 0:
        say(json.dumps([name, found]))
"""


def test_every_form_of_a_collective_is_counted_once_with_its_payload(tmp_path):
    done = run_ranks(CALLS, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found.pop("barrier") == []
    messages = sorted(found.pop("batch"))
    assert messages == [["recv", "world", [0, 1], 1, 48], ["send", "world", [0, 1], 1, 48]]
    for name, calls in found.items():
        op = name.split()[0]
        whole = 96 if op in ("all_gather", "gather", "scatter") else 48
        payload = whole * (2 if "coalesc" in name else 1)
        assert calls == [[op, "world", [0, 1], 1, payload]], name


GROUPS = """
mesh = world.mesh(dp=2, tp=2)
row = [dist.new_group([0, 1]), dist.new_group([2, 3])][world.rank // 2]
everyone = dist.new_group([3, 2, 1, 0])
x = torch.ones(3)
dist.all_reduce(x, group=mesh["dp"].get_group())
dist.all_reduce(x, group=mesh["tp"].get_group())
dist.all_reduce(x, group=row)
dist.all_reduce(x, group=everyone)
(dist.send if world.rank % 2 == 0 else dist.recv)(x, world.rank ^ 1, group=row)
found = {str(group) for (op, group) in world.traffic.groups() if op == "all_reduce"}
say(world.rank, sorted(found), world.traffic.snapshot()["all_reduce", 2].calls)
"""


def test_groups_have_their_name_and_ranks(tmp_path):
    done = run_ranks(GROUPS, 4, tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        "0 ['dp 0,2', 'ranks 0,1', 'tp 0,1', 'world 0,1,2,3'] 3",
        "1 ['dp 1,3', 'ranks 0,1', 'tp 0,1', 'world 0,1,2,3'] 3",
        "2 ['dp 0,2', 'ranks 2,3', 'tp 2,3', 'world 0,1,2,3'] 3",
        "3 ['dp 1,3', 'ranks 2,3', 'tp 2,3', 'world 0,1,2,3'] 3",
    ], done.stderr


def test_nccls_collectives_are_read_from_its_flight_recorder_without_bookkeeping():
    def record(number, name, sizes_in, sizes_out, dtype="Float", group=("0", "default_pg"), ns=0):
        return {
            "record_id": number,
            "profiling_name": name,
            "process_group": group,
            "time_created_ns": ns,
            "input_sizes": sizes_in,
            "input_dtypes": [dtype] * len(sizes_in),
            "output_sizes": sizes_out,
            "output_dtypes": [dtype] * len(sizes_out),
        }

    dp = ("1", "mesh_dp")
    dump = {
        "pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}, "1": {"ranks": "[1, 3]"}},
        "entries": [
            record(4, "nccl:all_reduce", [[12]], [[12]], "BFloat16"),
            record(5, "nccl:_all_gather_base", [[12]], [[24]], group=dp),
            record(6, "nccl:_reduce_scatter_base", [[24]], [[12]], group=dp),
            record(7, "nccl:all_reduce_barrier", [[1]], [[1]]),
            record(8, "nccl:send 0->1", [[2, 3]], [[2, 3]], group=dp),
            record(9, "nccl:coalesced", [], []),
        ],
    }
    entries, following = flight.read(dump, first=4)
    everyone, pair = Group("world", (0, 1, 2, 3)), Group("dp", (1, 3))
    assert [(e.op, e.group, e.payload_bytes) for e in entries] == [
        ("all_reduce", everyone, 24),
        ("all_gather", pair, 96),
        ("reduce_scatter", pair, 96),
        ("send", pair, 24),
    ]
    assert following == 10 and flight.read(dump, first=10) == ([], 10)
    with pytest.warns(UserWarning, match="2 calls were overwritten before they were counted"):
        flight.read(dump, first=2)


def test_groups_of_one_size_are_added_up_and_bookkeeping_is_apart_until_its_outer_end():
    traffic = flight.Traffic()
    for ranks, nbytes in (((0, 1), 100), ((0, 2), 20), ((0, 2), 3)):
        traffic.add("all_reduce", Group("dp", ranks), nbytes)
    with traffic.control():
        with traffic.control():
            pass
        traffic.add("all_reduce", Group("dp", (0, 1)), 7)
    assert traffic.snapshot() == {("all_reduce", 2): flight.Count(3, 123)}
    assert traffic.control_counts == {("all_reduce", 2): flight.Count(1, 7)}


@pytest.mark.gpu
def test_nccl_is_counted_like_gloo(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    code = """
    x = torch.ones(12, device=world.device)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(12, device=world.device), x)
    with world.control():
        dist.all_reduce(x)
    name = dist.group.WORLD._get_backend(world.device).name()
    say(name, world.traffic.snapshot(), world.traffic.control_counts)
    """
    done = run_ranks(code, 1, tmp_path, launcher="aiscale")
    one = "Count(calls=1, payload_bytes=48)"
    snapshot = f"{{('all_reduce', 1): {one}, ('all_gather', 1): {one}}}"
    assert done.stdout.splitlines() == [f"nccl {snapshot} {{('all_reduce', 1): {one}}}"], (
        done.stderr
    )


SCRIPT = """
from aiscale.measure import traffic
import torch, torch.distributed as dist
dist.init_process_group("gloo")
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
layer(torch.ones(3, 64)).sum().backward()
with traffic.count() as sent:
    layer(torch.ones(3, 64)).sum().backward()
    parts, part = list(torch.empty(2, 5).bfloat16()), torch.ones(5).bfloat16()
    dist.all_gather(parts, part, group=dist.new_group([0, 1]))
assert sent["all_reduce"].payload_bytes == sum(p.grad.nbytes for p in layer.parameters()), sent
assert sent["all_gather"].payload_bytes == 20 and "all_gather: calls 1, bytes 20" in str(sent), sent
with traffic.count() as nothing:
    dist.barrier()
assert not nothing
dist.destroy_process_group()
"""


def test_traffic_counts_the_collectives_of_any_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, tmp_path / "script.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
