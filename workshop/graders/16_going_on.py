"""Graders of what goes on when replicas die: the script is run, and a replica of it killed."""

import random
import re
import subprocess
import sys
from pathlib import Path

import torch

from aiscale.lesson.comparing import Wrong
from aiscale.lesson.gap_grader import TOLERANCE, Gap
from aiscale.lesson.grading import exercise, require, same
from aiscale.lesson.replicas import Replicas

STEPS, KILLED_AFTER = 14, 3


# 16.a and 16.b ------------------------------------------------------------------------------------------------------


def losses_of_one_process(folder: Path) -> dict[int, float]:
    command = [sys.executable, "train.py", f"--steps={STEPS}", "--save=alone"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"train.py stopped: {done.stderr.strip().splitlines()[-1]}")
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def with_a_death(folder: Path, meant: str) -> Replicas:
    """A job of three replicas, over, with the losses of one process; r0 was killed, and a new one came in.

    The survivors stand still until the newcomer is at the door, however slowly it starts. A step with another
    loss ends the job at once. `meant`: what to say of the steps after the newcomer came.
    """
    right, job = losses_of_one_process(folder), Replicas(folder, f"--steps={STEPS}", "--sequence-s=0.02")

    def compare(when: str, first: int) -> None:
        before = -1
        for _, step, loss, _ in job.steps():
            require(
                step > before, f"{when} step {step} is done, and step {before} was done before: who knows the step?"
            )
            told = f"{when} step {step} has the loss {loss:.4f}, and one process has {right.get(step, 0):.4f}"
            require(step < first or abs(loss - right.get(step, 0)) < TOLERANCE, told)
            before = step

    with job:
        try:
            job.until(rf"step {KILLED_AFTER} loss")
            compare("with three members", 0)
            job.kill("r0")
            job.until(rf"step {KILLED_AFTER + 2} loss")
            job.pause("r1", "r2")
            compare("with two members", KILLED_AFTER + 1)
            job.until_at_the_door("r0")
            job.go_on("r1", "r2")
            for line in (rf"step ({STEPS - 5}|{STEPS - 4}) loss", rf"step {STEPS - 1} loss"):
                job.until(line)
                compare(f"after a new r0 came, which {meant},", KILLED_AFTER + 3)
            job.wait()
        except RuntimeError as error:
            raise Wrong(f"three replicas of which r0 is killed do not come to the end: {error}") from None
    return job


share = Gap(
    "16.a",
    "Who computes what",
    "train_elastic.py",
    minutes=5,
    hints=[
        "A member takes every `members.size`-th sequence of `batch`, beginning with its own rank, as in lesson 02.",
        "Shares may be unequal, such as 6, 5 and 5: what each adds is a part of *the batch's* mean. A micro-batch of "
        "n sequences has the share n / len(batch) in it.",
        "`backward` adds to the gradients, and `loss += part.detach()` to the loss. The sum over members comes below.",
    ],
    solution="""
        share = batch[members.rank :: members.size]
        for micro_batch in share.split(args.micro_batch):
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) * len(micro_batch) / len(batch)
            part.backward()
            loss += part.detach()
    """,
    said=f"with three members, with two and again with three the losses of {STEPS} steps are those of one process",
)


@share.look
def the_loss_does_not_depend_on_deaths(folder):
    with_a_death(folder, "computes its share")


_SHARE = share.lines
share.refuses("all compute all", "with three members step 0", _SHARE.replace("[members.rank :: members.size]", ""))
share.refuses("shares as at the start", "with two members step 4", _SHARE.replace("members.size", "args.replicas"))
share.refuses("the mean of its own share", "with three members step 0", _SHARE.replace("len(batch)", "len(share)"))
share.refuses(
    "means of unequal shares",
    "with three members step",
    _SHARE.replace("/ len(batch)", "/ len(share) / members.size"),
)
share.refuses("no gradient", "with three members step 1", _SHARE.replace("part.backward()", "pass"))
share.refuses(
    "no weight for a micro-batch",
    "with three members step 0",
    _SHARE.replace(" * len(micro_batch) / len(batch)", ""),
)

heal = Gap(
    "16.b",
    "A newcomer is healed",
    "train_elastic.py",
    minutes=6,
    hints=[
        "`members.gather(done, everybody=done == args.steps)` forms a round. It returns a list: the steps that each "
        "member has done, by rank, with -1 for a newcomer.",
        "Whoever has done most steps has the newest weights: `steps.index(max(steps))` is its rank.",
        "`dist.broadcast(tensor, source)` for *each* tensor of `state`. Then all have done `max(steps)` steps, "
        "or 0 in a round of newcomers.",
    ],
    solution="""
        steps = members.gather(done, everybody=done == args.steps)
        source = steps.index(max(steps))
        done = -1  # half healed, it must not heal others
        for tensor in state:
            dist.broadcast(tensor, source)
        done = max(0, *steps)
    """,
    said="a new replica took over weights, moments and step, and all three end with the same, to the last bit",
)


@heal.look
def all_end_with_the_same(folder):
    states = with_a_death(folder, "needs the newest weights and all that belongs to them").states()
    require(len(states) == 3, f"only {', '.join(sorted(states))} came to the end")
    require(
        len(set(states.values())) == 1,
        "the losses are right, but weights and moments of the replicas differ at the end: what is not sent?",
    )


_HEAL = heal.lines
heal.refuses("from rank 0", "newest weights", _HEAL.replace("steps.index(max(steps))", "0"))
heal.refuses("nothing sent", "after a new r0 came", _HEAL.replace("dist.broadcast(tensor, source)", "pass"))
heal.refuses(
    "weights alone",
    "after a new r0 came",
    _HEAL.replace("in state:", "in state[: len(list(model.parameters()))]:"),
)
heal.refuses("its own step", "who knows the step?", _HEAL.replace("done = max(0, *steps)", "done = max(0, done)"))
heal.refuses(
    "from the step before",
    "with three members step 0",
    _HEAL.replace("done = max(0, *steps)", "done = max(0, *steps) - 1"),
)


# 16.1 ---------------------------------------------------------------------------------------------------------------


def seconds_of(replicas: int, step_s: float, every: int, start_s: float, gather_s: float, died_after: int) -> tuple:
    """(restarting, going on): the seconds that a death costs, by playing a job step by step."""
    steps = died_after + 4 * every + int(4 * replicas * start_s / step_s)
    restarting = died_after * step_s + start_s + (steps - died_after // every * every) * step_s
    clock, back = died_after * step_s + gather_s, died_after * step_s + gather_s + start_s
    for _ in range(steps - died_after):
        here = replicas if clock >= back else replicas - 1
        clock += step_s * replicas / here
    return restarting - steps * step_s, clock + gather_s - steps * step_s


@exercise(
    "16.1",
    "What a death costs",
    "seconds_lost",
    minutes=10,
    hints=[
        "Restarting: everybody waits for the start. Then the steps since the last checkpoint are done again: on "
        "average half of them.",
        "Going on: the members gather twice, once without the dead one, once with the new one.",
        "For `start_s` seconds one of n is missing, and the others do its work: (n - 1) / n of the usual steps.",
    ],
)
def what_a_death_costs(seconds_lost):
    for _ in range(4):
        replicas, step_s, every = random.randint(2, 16), random.uniform(0.1, 2), random.randint(2, 40) * 10
        start_s, gather_s = random.uniform(60, 900), random.uniform(5, 30)
        plays = [seconds_of(replicas, step_s, every, start_s, gather_s, every + died) for died in range(1, every + 1)]
        restarting, going_on = (sum(lost) / every for lost in zip(*plays, strict=True))
        found = seconds_lost(replicas, step_s, every, start_s, gather_s)
        require(isinstance(found, (tuple, list)) and len(found) == 2, f"return two numbers, not {str(found)[:60]}")
        where = f"with {replicas} replicas, {step_s:.1f} s a step, a start of {start_s:.0f} s"
        half, missing = every * step_s / 2, start_s / replicas
        causes = {
            "the steps since the last checkpoint are done again": start_s,
            "on average half an interval is lost, not a whole one": start_s + 2 * half,
            "all wait for the start as well": half,
            "these are steps, not seconds": start_s + every / 2,
        }
        # A death may come in any step of an interval: half a step more or less.
        same(found[0], restarting, f"{where}, restarting", causes=causes, rtol=step_s / restarting)
        causes = {
            "while the new one starts, one of n is missing": 2 * gather_s,
            "the members gather twice": gather_s + missing,
            "the others do not wait for the start: they go on": 2 * gather_s + start_s,
            "the others do (n - 1) / n of the work, so 1 / n is lost": 2 * gather_s + start_s / max(1, replicas - 1),
        }
        same(found[1], going_on, f"{where}, going on", causes=causes, rtol=1.01 * step_s / going_on)


_LOST = "return start_s + every * step_s / 2, 2 * gather_s + start_s / replicas"
what_a_death_costs.refuses("nothing repeated", "done again", _LOST.replace("start_s + every * step_s / 2", "start_s"))
what_a_death_costs.refuses("a whole interval", "not a whole one", _LOST.replace("* step_s / 2", "* step_s"))
what_a_death_costs.refuses("all wait", "they go on", _LOST.replace("/ replicas", ""))
what_a_death_costs.refuses("gathered once", "gather twice", _LOST.replace("2 * gather_s", "gather_s"))
what_a_death_costs.refuses("no share missing", "one of n is missing", _LOST.replace(" + start_s / replicas", ""))
what_a_death_costs.refuses("hard-coded for the shown job", "replicas", "return 420, 60")


# 16.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "16.2",
    "Who may begin",
    "may_begin",
    minutes=8,
    hints=[
        "If all replicas stand at the door, nobody else can be training.",
        "Otherwise somebody must know the weights of the newest round: who has done fewer steps than one of its "
        "members had done when it began has older ones.",
        "A newcomer has done -1 steps. A round that began with newcomers alone has trained since: 0 is the least.",
    ],
)
def who_may_begin(may_begin):
    for _ in range(300):
        replicas = random.randint(2, 6)
        step = random.choice([-1, 0, 1, 50])
        begun = random.choice([[], [step] * replicas, [step, -1], [step]])
        door = random.choices([-1, step, step + random.randint(1, 9), max(-1, step - 1)], k=random.randint(1, replicas))
        found = may_begin(list(door), list(begun), replicas)
        case = f"done {door} at the door of {replicas} replicas, newest round {begun or 'none'}"
        require(isinstance(found, bool), f"return True or False, not {str(found)[:60]}")
        if len(door) == replicas:
            require(found, f"{case}: all are here, so nobody else trains, and they may begin")
        elif max(door) < 0:
            require(not found, f"{case}: newcomers alone would train a second model from its first step")
        elif not begun or max(door) >= max(begun):
            require(found, f"{case}: somebody has the weights; the others may be dead")
        else:
            require(not found, f"{case}: nobody here has the weights with which that round began")


who_may_begin.refuses("anybody", "at the door", "return True")
who_may_begin.refuses("all or nobody", "may be dead", "return len(done) == replicas")
who_may_begin.refuses("a majority", "done", "return 2 * len(done) > replicas")
who_may_begin.refuses(
    "newcomers as the first round's", "second model", "return len(done) == replicas or max(done) >= max([-1, *begun])"
)
who_may_begin.refuses(
    "the least of the newest",
    "weights",
    "return len(done) == replicas or max(done) >= max(0, min(begun, default=0))",
)
who_may_begin.refuses("hard-coded for the shown door", "done", "return done != [-1]")


# 16.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "16.3",
    "One bit",
    "flipped",
    minutes=12,
    core=False,
    hints=[
        "Most replicas are right: `Counter(hashes).most_common(1)`, or the element-wise median of three.",
        "`tensor.view(torch.int32)` has the same bits as integers; `a ^ b` has those bits that differ.",
        "A number with one bit set is 2 ** bit; the sign bit of an int32 makes it negative: `& 0xFFFFFFFF` in Python.",
    ],
)
def one_bit(flipped):
    for case in ("rank 0", "sign", "healthy", "any"):
        healthy = case == "healthy"
        n, ranks = random.randint(20, 400), random.randint(3, 7)
        right = torch.randn(n)
        replicas = [right.clone() for _ in range(ranks)]
        rank = 0 if case == "rank 0" else random.randrange(1, ranks)
        where = rank, random.randrange(n), 31 if case == "sign" else random.randrange(31)
        if not healthy:
            bits = replicas[where[0]].view(torch.int32)
            bits[where[1]] ^= -(2**31) if where[2] == 31 else 2 ** where[2]
        found = flipped([replica.clone() for replica in replicas])
        if healthy:
            require(found is None, f"all replicas are equal, and you name {found}: return None")
            continue
        require(found is not None, f"rank {where[0]} differs in one bit, and you return None")
        require(isinstance(found, (tuple, list)) and len(found) == 3, f"return three integers, not {str(found)[:60]}")
        rank, place, bit = (int(number) for number in found)
        require(rank == where[0], f"rank {where[0]} of {ranks} differs from all others, and you name {rank}")
        require(place == where[1], f"rank {rank} is right, but the weight is number {where[1]}, not {place}")
        require(bit == where[2], f"rank and weight are right, but bit {where[2]} is flipped, not {bit}")


_FLIPPED = """
for rank, replica in enumerate(replicas):
    same = sum(torch.equal(replica, other) for other in replicas)
    if same < 2:
        other = replicas[rank - 1]
        differ = replica.view(torch.int32) ^ other.view(torch.int32)
        place = int(differ.nonzero()[0])
        return rank, place, (int(differ[place]) & 0xFFFFFFFF).bit_length() - 1
"""
one_bit.refuses(
    "the first that differs from rank 0",
    "and you",
    """
for rank, replica in enumerate(replicas):
    if not torch.equal(replica, replicas[0]):
        differ = (replica.view(torch.int32) ^ replicas[0].view(torch.int32))
        place = int(differ.nonzero()[0])
        return rank, place, (int(differ[place]) & 0xFFFFFFFF).bit_length() - 1
""",
)
one_bit.refuses(
    "numbers, not bits",
    "is flipped, not",
    """
for rank, replica in enumerate(replicas):
    if sum(torch.equal(replica, other) for other in replicas) < 2:
        place = int((replica != replicas[rank - 1]).nonzero()[0])
        return rank, place, int(replica[place].abs().log2().nan_to_num())
""",
)
one_bit.refuses("counted from 1", "is flipped, not", _FLIPPED.replace(".bit_length() - 1", ".bit_length()"))
one_bit.refuses("nothing is wrong", "and you return None", "return None")
one_bit.refuses("hard-coded for the shown bit", "and you name", "return 1, 2, 30")
