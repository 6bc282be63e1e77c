"""Lesson 14's training loop, which `benchmarks/choices.py` runs too, and its tables and figures of stored runs.

losses, skipped = train(model, optimizer, lr=2**-8, seed=0, steps=200)
held_out_loss(model, 64).mean()                      # nats for each byte of text that nobody trained on
table("norms", "post")                               # costs, buys here, told at scale, as Markdown
dots("formats", names, "fp32")                       # losses of choices over a base's, with a 95 % interval
"""

import math
import re
import statistics
from functools import cache
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

from aiscale.lesson.optim import clip_, set_lr
from aiscale.plan import published

TEXT = torch.tensor(list(Path(topics.__file__).read_bytes()))  # Python's own help texts, as in lesson 01
TRAIN, HELD_OUT = TEXT[: len(TEXT) * 9 // 10], TEXT[len(TEXT) * 9 // 10 :]


def windows(text, starts, length):
    """Inputs and targets (B,T) of the windows that begin at `starts`."""
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def held_out_loss(model, length, tokens=16384):
    """(T,): mean loss at each place of windows of `length`, over the same text for all lengths."""
    x, y = windows(HELD_OUT, torch.arange(0, tokens, length), length)
    parts = zip(x.split(32), y.split(32), strict=True)
    return torch.cat([F.cross_entropy(model(a).mT, b, reduction="none") for a, b in parts]).mean(0)


@cache
def counted_pairs():
    """Held-out loss (nats a byte), as of `held_out_loss`, of a table that says only which byte follows which, and how
    often, in the training text. To each count 0.1 is added, for pairs that are new."""
    counts = torch.full((256, 256), 0.1)
    counts.index_put_((TRAIN[:-1], TRAIN[1:]), torch.tensor(1.0), accumulate=True)
    table = (counts / counts.sum(1, keepdim=True)).log()
    read = HELD_OUT[: 16384 + 1]
    return -table[read[:-1], read[1:]].mean().item()


def warmed(share=0.1, fall="cosine"):
    """A schedule: the learning rate at a share `done` of the steps, as a share of its peak; linear warm-up."""
    falls = {"constant": lambda done: 1.0, "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2}

    def schedule(done):
        return min(1.0, done / share if share else 1.0) * falls[fall](done)

    return schedule


def train(model, optimizer, lr, *, seed, steps, batch=16, length=64, schedule=None, loss_scale=1.0):
    """Losses of all steps, and how many were skipped: a gradient that is not finite halves the loss scale. Without a
    scale it ends the run, whose last loss is NaN. Clipping at 1."""
    order, losses, skipped = torch.Generator().manual_seed(seed), [], 0
    schedule, scaling = schedule or warmed(), loss_scale > 1
    for step in range(steps):
        starts = torch.randint(len(TRAIN) - length, (batch,), generator=order)
        loss = model(*windows(TRAIN, starts, length))
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        losses.append(loss.item())
        gradients = [p.grad.div_(loss_scale) for p in model.parameters() if p.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            if not scaling:
                return [*losses[:-1], math.nan], skipped
            loss_scale, skipped = loss_scale / 2, skipped + 1
            continue
        clip_(model.parameters(), 1.0)
        set_lr(optimizer, lr * schedule((step + 1) / steps))
        optimizer.step()
    return losses, skipped


# Block scales ---------------------------------------------------------------------------------------------------------

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # and the same with a minus


def nearest_fp4(x):
    """The nearest number of FP4; what is larger than 6 becomes 6."""
    return FP4[torch.bucketize(x.abs(), (FP4[1:] + FP4[:-1]) / 2)] * x.sign()


def block_scaled(x, size):
    """Rounded to fp4; `size` neighbours along the last dim share a power of two (MXFP4)."""
    blocks = x.reshape(-1, size)
    scale = torch.exp2((torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent - 3).float())
    return (nearest_fp4(blocks / scale) * scale).view(x.shape)


# Stored runs ----------------------------------------------------------------------------------------------------------

#: what papers say that a choice buys, most of it in their abstracts, and where
TOLD = {
    "layer": ("norm before each sublayer: no warm-up needed", "Xiong et al. 2020", "2002.04745"),
    "RMS": ("as good as layer norm, 7 to 64 % less time", "Zhang, Sennrich 2019", "1910.07467"),
    "deep": ("1,000 layers train; 200 layers, 3.2B, beat 48 layers, 12B", "Wang et al. 2022", "2203.00555"),
    "post": ("the original transformer", "Vaswani et al. 2017", "1706.03762"),
    "learned": ("as good as sinusoids", "Vaswani et al. 2017, table 3", "1706.03762"),
    "sinusoidal": ("hoped to extend to longer texts", "Vaswani et al. 2017", "1706.03762"),
    "sinusoidal, D^-0.5": (
        "where Transformer's own code starts embeddings",
        "tensor2tensor",
        "github.com/tensorflow/tensor2tensor/blob/master/tensor2tensor/layers/modalities.py",
    ),
    "rotary": ("better on long texts", "Su et al. 2021", "2104.09864"),
    "alibi": ("1.3B: trained on 1,024, equal to sinusoids trained on 2,048", "Press et al. 2021", "2108.12409"),
    "t5": ("a number for each range of distances; T5 has it", "Raffel et al. 2019", "1910.10683"),
    "shaw": ("+1.3 and +0.3 BLEU over sinusoids; also on values, here on keys", "Shaw et al. 2018", "1803.02155"),
    "huang": ("better on SQuAD than earlier ones", "Huang et al. 2020", "2009.13658"),
    "relu": (
        "sparse; deep networks train without pretraining",
        "Glorot et al. 2011",
        "proceedings.mlr.press/v15/glorot11a.html",
    ),
    "gelu": ("better than ReLU in vision, text, speech", "Hendrycks, Gimpel 2016", "1606.08415"),
    "silu": ("ImageNet: +0.9 % over ReLU", "Ramachandran et al. 2017", "1710.05941"),
    "gated": ("better than ReLU and GELU in T5, at equal parameters", "Shazeer 2020", "2002.05202"),
    "sgd": ("convolutional networks, with momentum", "Goyal et al. 2017", "1706.02677"),
    "adam": ("little tuning", "Kingma, Ba 2014", "1412.6980"),
    "adamw": ("generalizes better than Adam with L2", "Loshchilov, Hutter 2017", "1711.05101"),
    "adamw, embeddings 2^-5": ("a control: embeddings at the rate of Muon, batch 8", "", ""),
    "adamw 2^-8, embeddings 2^-5": ("a control: the same, the others at AdamW's best rate", "", ""),
    "muon 2^-5, embeddings 2^-8": ("a control: Muon with embeddings at AdamW's best rate", "", ""),
    "adafactor": ("as good as Adam, almost without memory", "Shazeer, Stern 2018", "1804.04235"),
    "lars": ("ResNet-50 in batches of 32K", "You et al. 2017", "1708.03888"),
    "lamb": ("BERT in batches to 64K: 76 minutes, not 3 days", "You et al. 2019", "1904.00962"),
    "muon": ("half of AdamW's operations for the same loss", "Liu et al. 2025", "2502.16982"),
    "adamw8bit": ("as good as 32 bits, with uneven codes", "Dettmers et al. 2021", "2110.02861"),
    "none": ("causal attention alone knows the order", "Haviv et al. 2022", "2203.16634"),
    "fp32": ("the safe choice", "", ""),
    "control:": ("", "", ""),
    "fp6": ("needs a scale", "Rouhani et al. 2023", "2310.10537"),
    "fp4": ("needs a scale", "NVIDIA 2025", "2509.25149"),
    "mxfp4": ("needs further tricks", "Tseng et al. 2025", "2502.20586"),
    "fp16": ("as good as fp32, with loss scaling", "Micikevicius et al. 2017", "1710.03740"),
    "bf16": ("as good as fp32, without a scale", "Kalamkar et al. 2019", "1905.12322"),
    "tf32": (
        "as good as fp32",
        "NVIDIA 2021",
        "developer.nvidia.com/blog/accelerating-ai-training-with-tf32-tensor-cores",
    ),
    "fp8": ("as good as 16 bits, up to 175B, with scales", "Micikevicius et al. 2022", "2209.05433"),
    "mxfp8": ("as good as bf16: 8B, 15T tokens, with scales rounded up, here down", "Mishra et al. 2025", "2506.08027"),
    "mxfp6": ("a GPT trains with little loss", "Rouhani et al. 2023", "2310.10537"),
    "nvfp4": ("12B, 10T tokens: near fp8, with further tricks", "NVIDIA 2025", "2509.25149"),
}


def runs(topic):
    return published.measured("choices")["topics"][topic]


def where():
    """Command, machine and date of the stored runs."""
    facts = published.measured("choices")["machine"]
    names = ("command", "processor", "cores", "torch", "date")
    return ", ".join(f"{name} {facts[name]}" for name in names)


#: half of a 95 % interval, by Student's t: three seeds have two degrees of freedom
STANDARD_ERRORS = {3: 4.303, 6: 2.571}
#: the model without its layers: the head learns from one byte about the next
FLOOR = "control: products 0"


def differences(topic, name, base):
    """loss(name) - loss(base) of each seed that both ran with: some have nine, all the same first three."""
    return [one - other for one, other in zip(runs(topic)[name]["val"], runs(topic)[base]["val"], strict=False)]


def gain(topic, name, base):
    """Mean over the seeds of loss(name) - loss(base), and half of its 95 % interval: a seed's runs share their data.
    Where three seeds left a claim open, only the six that ran after them count: to look at the three again, which made
    us go on, would find a difference too often."""
    pairs = differences(topic, name, base)
    if len(pairs) > 3:
        pairs = pairs[3:]
    return statistics.mean(pairs), STANDARD_ERRORS[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5


def beside_floor(topic, name):
    """How many runs of a format end within 0.1 of the model without layers; 0 if all do: then they are one group."""
    if FLOOR not in runs(topic):
        return 0
    above = differences(topic, name, FLOOR)
    beside = sum(difference > -0.1 for difference in above)
    return beside if beside < len(above) else 0


def verdict(topic, name, base):
    """The gain in words; "not shown" if its interval includes 0. A run fails if a blind guess of a byte is better.
    Runs of two groups get no interval: their mean lies between the groups, where no run is."""
    if name == base:
        return f"{statistics.mean(runs(topic)[name]['val']):.3f}"
    values = runs(topic)[name]["val"]
    if failed := sum(value is None or value > math.log(256) for value in values):
        return f"{failed} of {len(values)} fails"
    if beside := beside_floor(topic, name):
        return f"{beside} of {len(values)} as without layers"
    mean, error = gain(topic, name, base)
    return f"{mean:+.3f} ± {error:.3f}" + (": not shown" if abs(mean) <= error else "")


#: what a choice costs, from the shapes of the stored runs: D width, L layers, H heads, F width of the hidden layer
D, L, H, F_PLAIN, F_GATED, LONGEST, DISTANCES, BUCKETS = 64, 2, 4, 192, 128, 256, 33, 16
COSTS = {
    "norms": {
        "pre, layer": "2 D = 64 numbers a norm",
        "pre, RMS": "D = 32 numbers a norm",
        "deep": "2 D = 64 numbers a norm",
        "post": "2 D = 64 numbers a norm",
    },
    "positions": {
        "learned": f"T D = {LONGEST * D:,} numbers",
        "sinusoidal": "nothing",
        "sinusoidal, D^-0.5": "nothing; embeddings start at D^-0.5, not 0.02",
        "rotary": "nothing; q and k are turned",
        "alibi": "nothing; one addition a score",
        "t5": f"buckets H = {BUCKETS * H} numbers; one bucket from 27 on",
        "shaw": f"L K D / H = {L * DISTANCES * D // H:,} numbers; q meets K = 33 distances, the last for 32 and more",
        "huang": f"L K D / H = {L * DISTANCES * D // H:,} numbers; q and k meet the same",
        "none": "nothing",
    },
    "activations": {
        "relu": f"keeps F = {F_PLAIN} numbers a token",
        "gelu": f"keeps 2 F = {2 * F_PLAIN}",
        "silu": f"keeps 2 F = {2 * F_PLAIN}",
        **dict.fromkeys(("reglu", "geglu", "swiglu"), f"keeps 4 F = {4 * F_GATED}"),
    },
    "optimizers": {
        "sgd": "4 bytes a weight; no decay here",
        "adam": "8 bytes a weight; no decay here",
        "adamw": "8 bytes a weight",
        "adamw, embeddings 2^-5": "8 bytes a weight",
        "adamw 2^-8, embeddings 2^-5": "8 bytes a weight",
        "adafactor": "4 bytes for each row and column; rate at most 1/√step",
        "lars": "4 bytes a weight; vectors take SGD's steps; no decay here",
        "lamb": "8 bytes a weight",
        "muon": "4 bytes a weight of a matrix; 30 D³ operations for its D² weights",
        "muon 2^-5, embeddings 2^-8": "as muon",
        "adamw8bit": "2 + 8/256 bytes a weight",
        "adamw8bit, even codes": "2 + 8/256 bytes a weight",
    },
    "formats": {
        "fp32": "32 bits",
        "tf32": "19 bits, in the unit only",
        "bf16": "16 bits",
        "fp16": "16 bits",
        "fp16, loss scaling": "16 bits; skips steps that overflow, none here",
        "fp8": "8 bits",
        "fp8, loss scaling": "8 bits",
        "fp8, scale by tensor": "8 bits, and the largest number first",
        "mxfp8": "8 + 8/32 = 8.25 bits",
        "fp6, loss scaling": "6 bits",
        "mxfp6": "6 + 8/32 = 6.25 bits",
        "fp4, loss scaling": "4 bits",
        "fp4, scale by tensor": "4 bits, and the largest number first",
        "mxfp4": "4 + 8/32 = 4.25 bits",
        "nvfp4": "4 + 8/16 = 4.5 bits, and the largest number first",
        "control: products 0": "none of the layers' products counts",
        "control: their gradients 0": "and none of their matrices learns",
    },
}


def table(topic, base, suffix=""):
    """What each choice costs, buys here and is told to buy, as Markdown; suffix: of the names in the stored runs."""
    lines = [f"| choice | costs | held-out loss here, minus that of {base} | told at scale |", "|---|---|---|---|"]
    for name, cost in ((name, cost) for name, cost in COSTS[topic].items() if name + suffix in runs(topic)):
        known = next(key for key in (name, *re.split(r"[ ,]+", name), "gated") if key in TOLD)
        words, source, at = TOLD[known]
        link = f" ([{source}](https://{f'arxiv.org/abs/{at}' if at[:4].isdigit() else at}))" if at else ""
        lines.append(f"| {name} | {cost} | {verdict(topic, name + suffix, base + suffix)} | {words}{link} |")
    return "\n".join(lines)


def dots(topic, names, base):
    """Held-out loss of each choice over the base's: a ring for each seed; unless they form two groups, a dot for the
    mean and a bar for its 95 % interval. Dashed: a table of counted pairs of bytes."""
    ax = plt.subplots(figsize=(7, 0.34 * len(names) + 0.9), layout="constrained")[1]
    for row, name in enumerate(names):
        values = differences(topic, name, base)
        color = "#0068B8" if name == base else "#2B313B"
        ax.plot(values, [row] * len(values), "o", ms=6, mfc="none", color=color, alpha=0.5)
        if beside_floor(topic, name) and name != base:
            continue
        mean, error = gain(topic, name, base)
        ax.errorbar(mean, row, xerr=error, fmt="o", ms=5, color=color)
    ax.axvline(0, color="gray", ls=":")
    pairs = counted_pairs() - statistics.mean(runs(topic)[base]["val"])
    ax.axvline(pairs, color="#D96709", ls="--", lw=1)
    ax.text(pairs, -0.6, "counted pairs", color="#D96709", fontsize=8, ha="center", va="bottom")
    xlabel = f"held-out loss over {base} (nats a byte)"
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))
    return ax
