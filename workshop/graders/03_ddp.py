"""Graders of the exercises on DDP: what the ranks compute is compared with one process and the whole batch."""

import ast
import random

import torch
from torch import nn

from aiscale.lesson.comparing import Wrong
from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same, same_on_ranks

GRADIENT_BYTES = 4 * 236_928  # of the model of model.py, in fp32


def serial_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean loss of all samples, in this process."""
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def draw_model() -> nn.Module:
    width = random.randint(3, 7)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def draw_batch(model: nn.Module, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, model[0].in_features).double(), torch.randn(samples, 1).double()


# 03.a ---------------------------------------------------------------------------------------------------------------

own_ddp = Gap(
    "03.a",
    "A DDP of your own",
    "train_own_ddp.py",
    minutes=10,
    explained={
        "has no attribute 'wait'": "an all_reduce with async_op=True returns a message to wait for; without, nothing",
        "has no attribute 'ready'": "the hook is a method `ready`",
        "has no attribute 'finish'": "the loop calls a method `finish`",
    },
    hints=[
        "`ready` keeps the weight in `self.bucket`. Are the gradients there together as large as `self.bucket_bytes`? "
        "Then they go: a third method, `send`, is called from both places.",
        "`send`: `torch.cat` of the flat gradients is one tensor, and an all_reduce with `async_op=True` returns at "
        "once. Keep message, tensor and weights together in `self.sent`, and begin a new list for the bucket.",
        "`finish`: send what is left; then for each message `wait()`, cut its tensor by "
        "`split([weight.numel() for weight in weights])`, and copy each piece into its gradient. Empty `self.sent`.",
    ],
    solution="""
        def ready(self, weight):
            if self.sync:
                self.bucket.append(weight)
                if sum(each.grad.nbytes for each in self.bucket) >= self.bucket_bytes:
                    self.send()

        def send(self):
            packed = torch.cat([each.grad.flatten() for each in self.bucket])
            message = dist.all_reduce(packed, dist.ReduceOp.AVG, async_op=True)
            self.sent.append((message, packed, self.bucket))
            self.bucket = []

        def finish(self):
            if self.bucket:
                self.send()
            for message, packed, weights in self.sent:
                message.wait()
                for weight, mean in zip(weights, packed.split([each.numel() for each in weights])):
                    weight.grad.copy_(mean.view_as(weight))
            self.sent = []
    """,
)


class Network:
    """`dist` for one process: the other rank always has three times this one's gradients."""

    def __init__(self):
        self.is_backward_over = False
        self.messages: list[int] = []  # numbers in each
        self.during_backward = 0  # messages
        self.early_waits = 0  # messages that the backward pass waited for
        self.late_waits = 0  # messages that were there already

    ReduceOp = torch.distributed.ReduceOp

    def __getattr__(self, name):
        return getattr(torch.distributed, name)

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        self.messages.append(tensor.numel())
        message = Message(self, tensor, 2.0 if op == torch.distributed.ReduceOp.AVG else 4.0)
        if async_op:
            return message
        message.wait()
        return None


class Message:
    def __init__(self, network: Network, tensor: torch.Tensor, factor: float):
        self.network, self.tensor, self.factor = network, tensor, factor
        self.has_come = False

    def wait(self):
        if self.has_come:
            self.network.late_waits += 1
        else:
            self.network.early_waits += not self.network.is_backward_over
            self.tensor.mul_(self.factor)
        self.has_come = True
        return True


def own_class(script: str, network: Network) -> type:
    """The class OwnDDP of a script, which sends by this network."""
    tree = ast.parse(script)
    found = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "OwnDDP"]
    names = {"torch": torch, "dist": network, "rank": 0, "world_size": 2}
    exec(compile(ast.Module(found, []), "train_own_ddp.py", "exec"), names)
    return names["OwnDDP"]


@own_ddp.look
def the_class_alone(folder):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5))).double()
    weights, x = list(model.parameters()), torch.randn(6, 8).double()
    network = Network()
    try:
        ddp = own_class((folder / "train_own_ddp.py").read_text(), network)(model, bucket_bytes=2 * 8 * 64)
        # the first two backward passes are one step, in which the second is to be sent
        steps = [[False, True], [True]]
        for number, passes in enumerate(steps, 1):
            model.zero_grad()
            for is_last in passes:
                network.messages, network.is_backward_over, ddp.sync = [], False, is_last
                model(x).square().sum().backward()
                network.is_backward_over = True
                told = "while `self.sync` is False, a message is sent: gradients are sent once a step"
                require(is_last or not network.messages, told)
            mine = [weight.grad.clone() for weight in weights]
            _require_a_bucket_to_leave(network, weights)
            ddp.finish()
            _require_means(network, mine, weights, number)
    except Wrong:
        raise
    except Exception:
        return  # in a style that this process cannot follow, or with an error that the ranks will tell


def _require_a_bucket_to_leave(network, weights):
    """After the backward pass, and before `finish`."""
    told = "the backward pass waits for each message: keep what `all_reduce(..., async_op=True)` returns for `finish`"
    require(not network.early_waits, told)
    sent, expected = (sum(sizes) for sizes in (network.messages, (weight.numel() for weight in weights)))
    told = (
        f"the backward pass sends {sent} numbers, and the weights have {expected}: what is sent must leave the bucket"
    )
    require(sent <= expected, told)
    told = f"{len(network.messages)} messages for {len(weights)} weights, of which two fill a bucket: pack them"
    require(len(network.messages) < len(weights), told)
    network.during_backward = len(network.messages)


def _require_means(network, mine, weights, number):
    step = f"step {number}: "
    require(network.messages, f"{step}nothing is sent")
    told = f"{step}no message leaves before the backward pass is over: send a full bucket from `ready`"
    require(network.during_backward, told)
    sent, expected = (sum(sizes) for sizes in (network.messages, (weight.numel() for weight in weights)))
    told = f"{step}{sent} numbers are sent, and the weights have {expected}: "
    require(sent >= expected, f"{told}the last bucket, which is not full, is sent by `finish`")
    require(sent == expected, f"{told}what is sent must leave the bucket")
    told = f"{step}messages of the step before are waited for again: `finish` must empty `self.sent`"
    require(not network.late_waits, told)
    factors = {round((weight.grad / own).median().item(), 3) for weight, own in zip(weights, mine, strict=True)}
    require(4.0 not in factors, f"{step}this is the sum over the ranks, not the mean")
    require(factors != {1.0}, f"{step}the means have come, and the gradients are as they were: copy them into `.grad`")
    told = f"{step}not each weight has its own mean: has all that was sent been unpacked, in the order of packing?"
    close = [torch.allclose(weight.grad, 2 * own) for weight, own in zip(weights, mine, strict=True)]
    require(all(close), told)


@own_ddp.demand
def gradients_go_once(tried):
    times = tried.traffic["all_reduce"] / GRADIENT_BYTES
    require(times < 1.1, f"the gradients are sent {times:.1f} times a step: look at `self.sync` before you send")


def _own(*changes):
    lines = own_ddp.lines
    for old, new in changes:
        assert old in lines, old
        lines = lines.replace(old, new)
    return lines


own_ddp.refuses("the sum", "this is the sum", _own(("dist.ReduceOp.AVG", "dist.ReduceOp.SUM")))
own_ddp.refuses(
    "each micro-batch is sent", "while `self.sync` is False", _own(("    if self.sync:\n", "    if True:\n"))
)
own_ddp.refuses(
    "a message for each tensor",
    "of which two fill a bucket",
    _own(("if sum(each.grad.nbytes for each in self.bucket) >= self.bucket_bytes:", "if True:")),
)
_IF_FULL = """
        if sum(each.grad.nbytes for each in self.bucket) >= self.bucket_bytes:
            self.send()
"""
own_ddp.refuses("all at the end", "before the backward pass is over", _own((_IF_FULL, "\n")))
own_ddp.refuses("it waits at once", "waits for each message", _own((", async_op=True", "")))
own_ddp.refuses("the last bucket stays", "which is not full", _own(("    if self.bucket:\n        self.send()\n", "")))
own_ddp.refuses("never unpacked", "as they were", _own(("weight.grad.copy_(mean.view_as(weight))", "pass")))
own_ddp.refuses("never waited for", "as they were", _own(("        message.wait()\n", "")))
own_ddp.refuses("the bucket stays full", "must leave the bucket", _own(("    self.bucket = []\n", "")))
own_ddp.refuses("sent is never emptied", "step 2", _own(("    self.sent = []", "    pass")))
own_ddp.refuses(
    "unpacked in another order",
    "in the order of packing",
    _own(("zip(weights, packed", "zip(reversed(weights), packed")),
)
own_ddp.refuses("nothing is kept", "nothing is sent", "def ready(self, weight): pass\n\n\ndef finish(self): pass")
own_ddp.refuses("no finish", "calls a method `finish`", own_ddp.lines.partition("\ndef finish")[0])

# 03.b ---------------------------------------------------------------------------------------------------------------

_NOT_WRAPPED = "`model` is not the DDP module: the wrapper is a new object, and keeps the name `model`"

wrapper = Gap(
    "03.b",
    "The wrapper",
    "train_ddp.py",
    minutes=3,
    explained={
        "has no attribute 'no_sync'": _NOT_WRAPPED,
        "has no attribute 'module'": _NOT_WRAPPED,
        "any parameter that requires a gradient": "DDP averages the gradients of weights that learn; these are frozen",
        "device_ids": "on CPUs, and where the model is on its GPU already, DDP needs no device_ids",
    },
    hints=[
        "`DistributedDataParallel(module)` returns a module that is called as the one inside.",
        "Give the wrapper the name `model`, so that the lines below use it. The optimizer has the parameters already.",
    ],
    solution="model = DistributedDataParallel(model)",
)

wrapper.refuses("not kept", "the wrapper is a new object", "DistributedDataParallel(model)")
wrapper.refuses("another name", "keeps the name `model`", "ddp = DistributedDataParallel(model)")
wrapper.refuses("DataParallel", "keeps the name `model`", "model = torch.nn.DataParallel(model)")
wrapper.refuses(
    "a device of the CPU", "needs no device_ids", "model = DistributedDataParallel(model, device_ids=[rank])"
)
wrapper.refuses(
    "a model that the optimizer does not have",
    "updates other tensors",
    "model = DistributedDataParallel((Llama() if args.llama else GPT()).to(device))",
)
wrapper.refuses(
    "the first blocks alone",
    "keeps the name `model`",
    "model.blocks = DistributedDataParallel(model.blocks)",
)
wrapper.refuses(
    "frozen",
    "these are frozen",
    "model = DistributedDataParallel(model.requires_grad_(False))",
)
wrapper.refuses(
    "another optimizer",
    "the optimizer's settings",
    """
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    """,
)
wrapper.refuses(
    "drawn anew after the wrapping",
    "different initial weights",
    """
    model = DistributedDataParallel(model)
    torch.manual_seed(rank)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    """,
)

# 03.c ---------------------------------------------------------------------------------------------------------------

once = Gap(
    "03.c",
    "Send once",
    "train_ddp.py",
    minutes=8,
    explained={
        "does not require grad": "no loss reaches the parameters: is `backward` called for each micro-batch?",
        "backward through the graph a second time": "`loss` keeps the graphs of all micro-batches: add `part.detach()`",
    },
    hints=[
        "Cut the share, and loop over the pieces as `train_ranks.py` does: each loss divided by their number, its "
        "backward pass, and `part.detach()` added to `loss`.",
        "Only the last micro-batch may send. `enumerate` tells which one it is; all others run under "
        "`with model.no_sync():`, forward pass and backward pass.",
        "`with nullcontext() if last else model.no_sync():` is one `with` for both. After the loop "
        "`dist.all_reduce(loss, dist.ReduceOp.AVG)`.",
    ],
    solution="""
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with nullcontext() if last else model.no_sync():  # gradients are sent once a step
                part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
                part.backward()
            loss += part.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
    """,
)


@once.demand
def micro_batches_send_once(tried):
    pieces, times = tried.micro_batches, tried.traffic.get("all_reduce", 0) / GRADIENT_BYTES
    require(
        pieces == 4, f"a rank computes its share in {pieces} pieces, and --micro-batch makes 4: memory is for those"
    )
    require(times < 1.5, f"gradients are sent {times:.0f} times a step: of all micro-batches only the last may send")


def _loop(before="", of="model.no_sync()", last="i + 1 == len(micro_batches)", loss="part.detach()", divided=True):
    """The loop with one mistake."""
    return f"""
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            {before}
            with nullcontext() if {last} else {of}:
                part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]){" / len(micro_batches)" * divided}
                part.backward()
            loss += {loss}
        dist.all_reduce(loss, dist.ReduceOp.AVG)
    """


once.refuses("no_sync forgotten", "no_sync() sends them once", _loop(of="nullcontext()"))
once.refuses("no_sync on all", "never averaged", _loop(last="False"))
once.refuses("the last index is one off", "never averaged", _loop(last="i == len(micro_batches)"))
once.refuses("the first one sends", "one part of it was averaged", _loop(last="i == 0"))
once.refuses("two send", "sent 2 times", _loop(last="i > 1"))
once.refuses("the contexts exchanged", "one part of it was averaged", _loop(last="i + 1 < len(micro_batches)"))
once.refuses("no division by the micro-batches", "not divided by their number", _loop(divided=False))
once.refuses("set to zero in the loop", "is zero_grad() called once a step", _loop(before="optimizer.zero_grad()"))
once.refuses(
    "the backward pass alone under no_sync",
    "no_sync() sends them once",
    """
    loss = torch.zeros((), device=device)
    micro_batches = batch.to(device).split(args.micro_batch)
    for i, micro_batch in enumerate(micro_batches):
        part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
        with nullcontext() if i + 1 == len(micro_batches) else model.no_sync():
            part.backward()
        loss += part.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)
once.refuses("the loss of rank 0", "is the mean", _loop().replace("dist.all_reduce(loss, dist.ReduceOp.AVG)", ""))
once.refuses(
    "averaged once more by hand",
    "divided by the number of ranks twice",
    _loop()
    + """
        for weight in model.parameters():
            weight.grad /= world_size
    """,
)
once.refuses(
    "the share in one piece",
    "in 1 pieces, and --micro-batch makes 4",
    """
    loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)

# 03.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "03.1",
    "Unequal shares",
    "average_unequal",
    minutes=8,
    ranks=True,
    inplace=True,
    hints=[
        "A rank's gradient is a mean over its own samples. Times their number it is a sum, and sums of ranks add up.",
        "By what do you divide the sum of all ranks? One more all_reduce, of one number, tells every rank.",
    ],
)
def unequal_shares(average_unequal):
    for _ in range(2):
        model = draw_model()
        sizes = random.sample(range(1, 9), average_unequal.size)
        x, y = draw_batch(model, sum(sizes))
        whole = serial_gradient(model, x, y)
        parts = [serial_gradient(model, *share) for share in zip(x.split(sizes), y.split(sizes), strict=True)]
        found = average_unequal.each(parts, sizes)
        mean, total, n = sum(parts) / len(parts), sum(sizes), len(sizes)
        elsewhere = "`gradient` is as it was: its numbers must change, so a new or a returned tensor does not count"
        unchanged = elsewhere if average_unequal.sent[0] else "nothing has arrived from the other ranks"
        scales = {
            1 / n: "the weights add up to 1 already, so nothing is left to divide by",
            total: "divide by all samples",
        }
        causes = {
            "this is the mean of the ranks: a rank with 1 sample counts as much as one with 8": [mean] * n,
            "this is the sum of the ranks' means": [sum(parts)] * n,
            unchanged: parts,
            "each rank divides by its own number of samples, not by that of all ranks": [
                whole * total / s for s in sizes
            ],
        }
        same_on_ranks(found, [whole] * n, "the gradient", scale=scales, causes=causes, rtol=1e-6)


unequal_shares.refuses(
    "mean of the ranks",
    "counts as much as one with 8",
    """
    dist.all_reduce(gradient)
    gradient /= world_size
    """,
)
unequal_shares.refuses(
    "sum of the ranks' means",
    "the sum of the ranks' means",
    "dist.all_reduce(gradient)",
)
unequal_shares.refuses(
    "divided by its own samples",
    "by its own number of samples",
    """
    gradient *= n_samples
    dist.all_reduce(gradient)
    gradient /= n_samples
    """,
)
unequal_shares.refuses("nothing sent", "nothing has arrived", "gradient *= 1")
unequal_shares.refuses(
    "hard-coded for the shown 8 samples",
    "times what it should be",
    """
    gradient *= n_samples / 8
    dist.all_reduce(gradient)
    """,
)


# 03.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "03.2",
    "What is exposed?",
    "exposed_s",
    minutes=8,
    hints=[
        "Keep one number: when the network is free again. A message begins when it is free and the bucket is complete.",
        "`free = max(free, ready) + latency_s + nbytes / bytes_per_s`, in turn. When did the backward pass end?",
    ],
)
def what_is_exposed(exposed_s):
    for slow in (False, True, False, True):
        count, latency_s, rate = random.randint(2, 6), random.uniform(0.1, 0.4), random.choice([10.0, 20.0, 40.0])
        steps = [random.uniform(0.5, 3) for _ in range(count)]
        ready_s = [sum(steps[: i + 1]) for i in range(count)]
        sizes = [random.randint(20, 90) * (4 if slow else 1) / 2 for _ in range(count)]
        costs = [latency_s + size / rate for size in sizes]
        # the last message ends as late as some bucket, and all that are sent after it, make it
        last_s = max(ready_s[i] + sum(costs[i:]) for i in range(count))
        expected = last_s - ready_s[-1]
        causes = {
            "this is when the last message ends: subtract the end of the backward pass": last_s,
            "a message waits until the one before it has ended": max(
                ready + cost - ready_s[-1] for ready, cost in zip(ready_s, costs, strict=True)
            ),
            "messages leave during the backward pass, too": sum(costs),
            "each message pays the latency": max(
                ready_s[i] + sum(costs[i:]) - latency_s * (count - i) for i in range(count)
            )
            - ready_s[-1],
            "a bucket cannot leave before it is complete": max(sum(costs) - ready_s[-1], 0.0),
        }
        found = exposed_s(ready_s, sizes, latency_s, rate)
        same(found, expected, f"{count} buckets, what is exposed", causes=causes, rtol=1e-9)


_FREE = """
free = 0.0
for ready, nbytes in zip(ready_s, sizes_bytes):
    free = {begins} + {takes}
return free{less}
"""
_EXPOSED = {"begins": "max(free, ready)", "takes": "latency_s + nbytes / bytes_per_s", "less": " - ready_s[-1]"}
what_is_exposed.refuses("the end", "subtract the end", _FREE.format(**_EXPOSED | {"less": ""}))
what_is_exposed.refuses(
    "no queue",
    "has ended",
    """
    ends = [ready + latency_s + nbytes / bytes_per_s for ready, nbytes in zip(ready_s, sizes_bytes)]
    return max(ends) - ready_s[-1]
    """,
)
what_is_exposed.refuses(
    "all at the end",
    "leave during the backward pass",
    "return sum(latency_s + nbytes / bytes_per_s for nbytes in sizes_bytes)",
)
what_is_exposed.refuses("no latency", "pays the latency", _FREE.format(**_EXPOSED | {"takes": "nbytes / bytes_per_s"}))
what_is_exposed.refuses("too early", "is exposed", _FREE.format(**_EXPOSED | {"begins": "free"}))
what_is_exposed.refuses("hard-coded for the shown buckets", "is exposed", "return 2.5")


# 03.3 ---------------------------------------------------------------------------------------------------------------


def watch() -> None:
    """On a rank: from now on keep the numbers of each tensor that goes to all_reduce."""
    import torch.distributed as dist

    dist.messages = []
    dist.unwatched = real = getattr(dist, "unwatched", dist.all_reduce)

    def all_reduce(tensor, *args, **kwargs):
        dist.messages.append(tensor.flatten().tolist())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def watched() -> list[list[float]]:
    """On a rank: what all_reduce was given; from now on it is not watched."""
    import torch.distributed as dist

    dist.all_reduce = dist.unwatched
    return dist.messages


def fill(sizes: list[int], cap: int) -> list[list[int]]:
    """The sizes of the tensors in each bucket, filled greedily, from the last tensor to the first."""
    buckets: list[list[int]] = []
    for size in reversed(sizes):
        if buckets and sum(buckets[-1]) + size <= cap:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    return buckets


@exercise(
    "03.3",
    "Buckets by hand",
    "all_reduce_in_buckets",
    minutes=15,
    core=False,
    ranks=True,
    inplace=True,
    hints=[
        "Two loops: one makes lists of tensors, none with more bytes than the cap; one sends a list as one tensor.",
        "`torch.cat([t.reshape(-1) for t in bucket])` packs. A tensor has `numel() * element_size()` bytes.",
        "Unpack with `flat.split([t.numel() for t in bucket])`; `t.copy_(piece.view_as(t))` writes in place.",
    ],
)
def buckets_by_hand(all_reduce_in_buckets):
    for _ in range(2):
        n = all_reduce_in_buckets.size
        shapes = [(random.randint(2, 4), random.randint(2, 6)) for _ in range(random.randint(8, 12))]
        shapes[random.randrange(len(shapes))] = (8, 10)  # larger than the cap: it has a bucket to itself
        cap = random.choice([384, 448, 512])
        gradients = [[torch.randn(shape).double() for shape in shapes] for _ in range(n)]
        expected = [torch.stack(tensors).mean(0) for tensors in zip(*gradients, strict=True)]
        all_reduce_in_buckets.on_ranks(watch)
        found = all_reduce_in_buckets.each(gradients, [cap] * n)
        messages = all_reduce_in_buckets.on_ranks(watched)[0]
        calls, nbytes = all_reduce_in_buckets.sent[0].get("all_reduce", (0, 0))
        for i, mean in enumerate(expected):
            causes = {
                "nothing has arrived from the other ranks: is what was sent written back?": [g[i] for g in gradients],
            }
            mine = [tensors[i] for tensors in found]
            scale = {n: "this is the sum of the ranks, not the mean"}
            same_on_ranks(mine, [mean] * n, f"gradient {i}", scale=scale, causes=causes, rtol=1e-6)
        sizes = [8 * a * b for a, b in shapes]
        fewest = len(fill(sizes, cap))
        require(
            nbytes == sum(sizes), f"right, but a rank handed over {nbytes} bytes, and the gradients have {sum(sizes)}"
        )
        require(calls < len(sizes), f"right, but {calls} messages for {len(sizes)} tensors: that is one for each")
        largest = max(sizes)
        together = [nbytes for nbytes in (8 * len(message) for message in messages) if cap < nbytes != largest]
        told = f"right, but {together[0] if together else 0} bytes travel in one message, which may have {cap}"
        require(not together, told)
        told = "right, but the last tensor, whose gradient is ready first, is not in the first message: begin with it"
        require(not messages or set(gradients[0][-1].flatten().tolist()) <= set(messages[0]), told)
        require(
            calls <= fewest + 2,
            f"right, but in {calls} messages, and {fewest} would do: fill a bucket before you send it",
        )


buckets_by_hand.refuses(
    "one message for each tensor",
    "that is one for each",
    """
    for g in gradients:
        dist.all_reduce(g)
        g /= world_size
    """,
)
buckets_by_hand.refuses(
    "one bucket for everything",
    "bytes travel in one message",
    """
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    for g, piece in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(piece.view_as(g))
    """,
)
_BUCKETS = """
buckets = [[]]
for g in reversed(gradients):
    if buckets[-1] and sum(t.nbytes for t in buckets[-1]) + g.nbytes > cap_bytes:
        buckets.append([])
    buckets[-1].append(g)
for bucket in buckets:
    flat = torch.cat([g.reshape(-1) for g in bucket])
    dist.all_reduce(flat)
"""
buckets_by_hand.refuses("never unpacked", "written back", _BUCKETS)
buckets_by_hand.refuses(
    "hard-coded for the shown cap, by count of tensors",
    "bytes travel in one message",
    """
    for k in range(0, len(gradients), 4):
        flat = torch.cat([g.reshape(-1) for g in gradients[k : k + 4]])
        dist.all_reduce(flat)
        flat /= world_size
        for g, piece in zip(gradients[k : k + 4], flat.split([g.numel() for g in gradients[k : k + 4]])):
            g.copy_(piece.view_as(g))
    """,
)
_UNPACK = """
    flat /= world_size
    for g, piece in zip(bucket, flat.split([g.numel() for g in bucket])):
        g.copy_(piece.view_as(g))
"""
buckets_by_hand.refuses(
    "the first tensor first",
    "is not in the first message",
    _BUCKETS.replace("reversed(gradients)", "gradients") + _UNPACK,
)
