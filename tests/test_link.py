"""The emulated slow link: a collective takes at least bytes / rate, while the rank computes."""

import contextlib

import pytest

from aiscale.launch import launch
from aiscale.measure import slowed
from aiscale.measure.distributed.link import Link
from aiscale.plan import cost
from aiscale.train.model import GPT
from aiscale.train.presets import shape_of
from aiscale.train.record import read_metrics
from ranks import COLLECTIVES, run_ranks


def test_a_link_is_slow_only_inside_and_frames_take_their_share_of_its_rate():
    link = Link()
    with contextlib.suppress(RuntimeError), link.at(100):
        messages, nbytes = cost.collective_terms("all_reduce", 2**20, 2, "gloo")
        framed_s = nbytes * 1514 / 1448 * 8 / 100e6  # each frame of 1514 bytes carries 1448
        expected_s = messages * link.latency_s + framed_s
        assert link.seconds("all_reduce", 2**20, 2) == pytest.approx(expected_s)
        with link.at(10):
            assert link.rate_mbit_s == 10
        assert link.rate_mbit_s == 100
        raise RuntimeError
    assert link.rate_mbit_s == 0


TIMED = """
import time
# S numbers (768 KiB, divisible by 2 and 3), RATE Mbit/s
n, r, S, RATE = world.size, world.rank, 3 * 2**16, 100
x = torch.ones(S)

def seconds(action):
    world.barrier()
    start = time.monotonic()
    action()
    return time.monotonic() - start

def on_link_s(op):
    messages, nbytes = collective_terms(op, x.nbytes, n, "gloo")
    return messages * world.link.latency_s + nbytes * 8 / (RATE * 1e6)
from aiscale.plan.cost import collective_terms
"""

EACH = """
works = collectives(world, x.nbytes)
def send_to_receiver():
    if r == 0:
        return dist.send(x, 1)
    return dist.recv(x) if r == 1 else None
works["send to whoever receives"] = send_to_receiver
world.link.rate_mbit_s = RATE
for op, action in works.items():
    took_s = seconds(action)
    if r < 2 or not op.startswith("send"):
        say(took_s, on_link_s(op.split()[0]), op)
"""


def test_every_collective_and_message_takes_at_least_its_bytes_over_the_rate(tmp_path):
    done = run_ranks(TIMED + COLLECTIVES + EACH, 3, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 8 + 2 * 2
    # ranks do not leave the barrier before it at exactly the same time
    for seconds, least_s, op in lines:
        assert float(seconds) >= 0.9 * float(least_s) > 0.03, op


OVERLAP = """
x[0] = r

def after_computing():
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    time.sleep(1.2 * link_s)  # nobody asks meanwhile
    begun = time.monotonic()
    work.wait()
    say("waited", time.monotonic() - begun < link_s / 2)

def by_future():
    begun = time.monotonic()
    future = dist.all_reduce(x, async_op=True).get_future()
    then = future.then(lambda done: (time.monotonic(), done.value()[0]))
    ended, first = then.wait()
    say("future", ended >= begun + link_s and first is not None)

def queued():
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    works[2].wait()

def late():  # the others have nothing to send before rank 0 has come
    time.sleep(0.3 if r == 0 else 0)
    joined = time.monotonic()
    dist.all_reduce(x)
    ended = time.monotonic()
    # gloo starts before rank 0's card is done, by the least time that it took so far: it may take
    # less this time
    say("late", ended >= world.gather(joined)[0] + 0.5 * link_s)

def in_order():  # ranks pair collectives by the order in which a group gets them, bookkeeping too
    ones = torch.ones(S)
    work = dist.all_reduce(ones, async_op=True)
    total = world.sum(r)
    world.link.rate_mbit_s = 0
    dist.all_reduce(x)
    world.link.rate_mbit_s = RATE
    work.wait()
    say("order", total == 3 and ones.unique().tolist() == [3])

# waits for a collective in what hangs on another's future, as torch's PowerSGD hook does
def nested():
    again = lambda done: dist.all_reduce(x, async_op=True).get_future().wait()
    dist.all_reduce(x, async_op=True).get_future().then(again).wait()

def many_ways():  # two messages to different ranks leave one after the other
    works = [dist.isend(x, other) for other in range(n) if other != r]
    works += [dist.irecv(torch.empty(S), other) for other in range(n) if other != r]
    for work in works:
        work.wait()

# slower where a stall would be seen
for RATE, actions in [(10, [after_computing, by_future, late]), (100, [in_order])]:
    world.link.rate_mbit_s, link_s = RATE, on_link_s("all_reduce")
    for action in actions:
        action()
say("queued", seconds(queued) >= 3 * link_s)
say("nested", seconds(nested) >= 2 * link_s)
say("messages", seconds(many_ways) >= 2 * on_link_s("send"))
world.link.rate_mbit_s = 0
say("off", type(dist.all_reduce(x, async_op=True)).__name__ != "Delayed")
"""


@pytest.mark.alone
def test_the_link_works_while_a_rank_computes_and_later_requests_queue(tmp_path):
    done = run_ranks(TIMED + OVERLAP, 3, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 3 * 8 and [line for line in lines if "False" in line] == []


DDP = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard

def trained(rate_mbit_s, shard):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    sent_bytes = sum(p.nbytes for p in model.parameters())
    model = fully_shard(model) if shard else DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(r)
    x = torch.randn(8, 64)
    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with world.link.at(rate_mbit_s):
        took_s = [seconds(step) for _ in range(4)]
    weights = [p.full_tensor() if shard else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in weights]), min(took_s[1:]), sent_bytes

for shard in (False, True):
    fast, slow = trained(0, shard), trained(30, shard)
    say(shard, torch.equal(fast[0], slow[0]), slow[1] >= slow[2] * 8 / 30e6)
"""


@pytest.mark.extended
def test_training_gives_the_same_weights_and_takes_at_least_the_time_of_its_bytes(tmp_path):
    done = run_ranks(TIMED + DDP, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(line.endswith("True True") for line in lines), lines


def test_a_trainer_on_slow_cards_has_the_same_losses_and_waits_for_its_bytes(tmp_path):
    words = ["-m", "aiscale.train.ddp", "--steps=3", "--save-every=0"]
    slow = ["-m", "aiscale.measure.slowed", "20", *words, f"--save={tmp_path / 'slow'}"]
    assert launch(2, [*words, f"--save={tmp_path / 'fast'}"]) == 0
    assert launch(2, slow) == 0
    fast, slow = (read_metrics(tmp_path / name) for name in ("fast", "slow"))
    assert [line["loss"] for line in fast] == [line["loss"] for line in slow]
    # Each of two ranks sends as many bytes as the gradient has.
    gradient_bytes = sum(weight.nbytes for weight in GPT(shape_of("tiny")).parameters())
    assert min(line["seconds"] for line in slow) >= gradient_bytes * 8 / 20e6


@pytest.mark.parametrize("words", (["fast", "train.py"], ["0", "train.py"], ["20"], ["20", "-m"]))
def test_what_is_no_rate_or_no_script_is_refused_in_a_line(words, capsys):
    with pytest.raises(SystemExit) as refused:
        slowed.main(words)
    assert refused.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_busiest_card_carries_no_less_than_the_mean_one():
    for op in cost.COLLECTIVES:
        for n in (2, 3, 4, 8):
            busiest = cost.collective_terms(op, 2**24, n, "gloo")[1]
            mean = cost.wire_bytes(op, 2**24, n, "gloo")
            assert busiest >= mean * 0.999, (op, n)
