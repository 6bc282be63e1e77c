"""Choices of a model and of its training, one at a time, over three seeds or nine, for lesson 14.

    python benchmarks/choices.py FOLDER [--topics norms formats] [--quick]  # half an hour, 2 cores

A small GPT reads the bytes of Python's help texts. Norms, positions, activations and optimizers get
the same search: on seed 3 the learning rate goes by factors of 2 from a usual one until both
neighbours are worse; then seeds 0, 1 and 2 run at the best. Schedules, formats and norms over 300
steps are compared at 2^-8. Each run is a small JSON in FOLDER, so a stopped benchmark goes on where
it was; FOLDER/choices.json is the result. --quick: a few steps, to try the script. Cases test
explanations. "embeddings 2^-5" and "2^-8": under Muon embeddings take AdamW's step at Muon's rate.
"sinusoidal, D^-0.5": the model multiplies embeddings by D^0.5, so that they start as large as the
waves.
"""

import argparse
import json
import math
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from common import machine_facts

from aiscale.errors import write_whole
from aiscale.lesson.model import GPT
from aiscale.lesson.optim import build_optimizer
from aiscale.plan.config import ModelConfig, OptimizerConfig

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))
from instruments.choices import block_scaled, held_out_loss, train, warmed

SEEDS, SEARCH_SEED, CURVE, DECAY = (0, 1, 2), 3, 20, 0.2
NINE = (*SEEDS, *range(4, 10))  #: where three seeds left a claim open
#: LARS': its vectors take plain steps at the whole rate, so matrices need a ratio with which SGD's
#: rate, 1, fits both; with the paper's 0.001 the best rate was 16, and vectors took steps 16 times
#: as long as SGD's best
TRUST = 2**-6
SEARCHED = ("norms", "positions", "activations", "optimizers")
SHAPE = {"n_layer": 2, "n_head": 4, "d_model": 64, "max_seq_len": 256}
BASE = {
    "optimizer": "adamw",
    "lr": 2**-8,
    "batch": 16,
    "length": 64,
    "steps": 200,
    "warm": 0.1,
    "schedule": "cosine",
}

# Number formats ----------------------------------------------------------------------------------

#: bits of exponent and fraction, largest number
BITS = {
    "tf32": (8, 10, 3.4e38),
    "e4m3": (4, 3, 448),
    "e5m2": (5, 2, 57344),
    "e3m2": (3, 2, 28),
    "e2m1": (2, 1, 6),
}


def nearest(x, kind):
    """The nearest numbers of a format, ties to even; what is too large becomes its largest."""
    exponent_bits, fraction_bits, largest = BITS[kind]
    exponent = (torch.frexp(x).exponent - 1).clamp(min=2 - 2 ** (exponent_bits - 1))
    step = torch.exp2((exponent - fraction_bits).float())
    return ((x / step).round() * step).clamp(-largest, largest)


def scaled(x, kind, size, scale="power"):
    """`size` neighbours along the last dim share a scale.
    It is a power of two (MX), an e4m3 number (NVFP4), or fp32."""
    blocks, largest = x.reshape(-1, size), BITS[kind][2]
    most = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    if scale == "power":
        by = torch.exp2(most.log2().floor() - math.floor(math.log2(largest)))
    elif scale == "e4m3":
        whole = most.max() / (largest * BITS["e4m3"][2])  # fp32, one for the tensor
        by = (nearest(most / largest / whole, "e4m3") * whole).clamp(min=1e-30)
    else:
        by = most / largest
    return (nearest(blocks / by, kind) * by).view(x.shape)


def by_tensor(x, kind):
    return scaled(x.contiguous(), kind, x.numel(), "fp32")


def pair(function, kind, of_gradients, **options):
    """Rounding of weights and activations, and of gradients."""
    return tuple(partial(function, kind=each, **options) for each in (kind, of_gradients))


def cast(x, dtype):
    return x.to(dtype).float()


FORMATS = {
    "fp32": None,
    "tf32": pair(nearest, "tf32", "tf32"),
    "bf16": (partial(cast, dtype=torch.bfloat16),) * 2,
    "fp16": (partial(cast, dtype=torch.float16),) * 2,
    "fp16, loss scaling": (partial(cast, dtype=torch.float16),) * 2,
    "fp8": pair(nearest, "e4m3", "e5m2"),
    "fp8, loss scaling": pair(nearest, "e4m3", "e5m2"),
    "fp8, scale by tensor": pair(by_tensor, "e4m3", "e5m2"),
    "mxfp8": pair(scaled, "e4m3", "e4m3", size=32),
    "fp6, loss scaling": pair(nearest, "e3m2", "e3m2"),
    "mxfp6": pair(scaled, "e3m2", "e3m2", size=32),
    "fp4, loss scaling": pair(nearest, "e2m1", "e2m1"),
    "fp4, scale by tensor": pair(by_tensor, "e2m1", "e2m1"),
    "mxfp4": (partial(block_scaled, size=32),) * 2,
    "nvfp4": pair(scaled, "e2m1", "e2m1", size=16, scale="e4m3"),
    "control: products 0": (torch.zeros_like,) * 2,
    "control: their gradients 0": (torch.clone, torch.zeros_like),
}


class Product(torch.autograd.Function):
    """x w^T, of which all three products read rounded operands; sums are fp32.
    One product is forward, two are backward. Blocks lie along the dim that a product sums over, so
    a tensor is rounded once for each product."""

    @staticmethod
    def forward(ctx, x, w, rounding):
        ctx.save_for_backward(x, w)
        ctx.rounding = rounding
        return rounding[0](x) @ rounding[0](w).T

    @staticmethod
    def backward(ctx, d_y):
        (x, w), (own, of_gradient) = ctx.saved_tensors, ctx.rounding
        d_x = of_gradient(d_y) @ own(w.T.contiguous()).T
        d_w = (
            of_gradient(d_y.flatten(0, -2).T.contiguous()) @ own(x.flatten(0, -2).T.contiguous()).T
        )
        return d_x, d_w, None


def round_products(model, rounding):
    """All layers' matrices; as NVIDIA's recipes do, embedding, head and attention stay in fp32."""
    for layer in model.blocks.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = lambda x, m=layer: Product.apply(x, m.weight, rounding) + m.bias


# 8-bit Adam --------------------------------------------------------------------------------------


def pack(x, power, size=256):
    """One byte a number, and an fp32 scale a block: sign(x) |x / largest|^power in 127ths."""
    blocks = F.pad(x.flatten(), (0, -x.numel() % size)).view(-1, size)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return ((blocks / largest).abs() ** power * blocks.sign() * 127).round().to(torch.int8), largest


def unpack(codes, largest, power, like):
    share = codes / 127
    return (
        (share.abs() ** (1 / power) * share.sign() * largest)
        .flatten()[: like.numel()]
        .view_as(like)
    )


class Adam8bit(torch.optim.Optimizer):
    """AdamW whose mean gradient and root of the mean square are kept in bytes."""

    def __init__(self, parameters, lr, power, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
        super().__init__(parameters, {"lr": lr})
        self.power, self.betas, self.eps, self.decay, self.steps = power, betas, eps, decay, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        (one, two), lr = self.betas, self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            m, root = (
                unpack(*state[key], self.power, p) if state else torch.zeros_like(p)
                for key in ("m", "root")
            )
            m, v = one * m + (1 - one) * p.grad, two * root**2 + (1 - two) * p.grad**2
            state["m"], state["root"] = pack(m, self.power), pack(v.sqrt(), self.power)
            if p.dim() > 1:
                p.mul_(1 - lr * self.decay)
            p.sub_(lr * m / (1 - one**self.steps) / ((v / (1 - two**self.steps)).sqrt() + self.eps))


def state_bytes(optimizer):
    """Bytes of the tensors that an optimizer keeps, step counters left out."""
    kept = [
        part
        for state in optimizer.state.values()
        for value in state.values()
        for part in parts(value)
    ]
    return sum(tensor.nbytes for tensor in kept if tensor.dim())


def parts(value):
    return value if isinstance(value, tuple) else (value,) if torch.is_tensor(value) else ()


# A run -------------------------------------------------------------------------------------------


def build_model(case):
    model = GPT(ModelConfig(**SHAPE | case.get("model", {})))
    beta = (8 * model.config.n_layer) ** -0.25
    with torch.no_grad():
        if case.get("post_norm"):  # deep norm's place with alpha = beta = 1
            for block in model.blocks:
                block.alpha = 1.0
                block.attn.qkv.weight[2 * model.config.d_model :] /= beta
                for weight in (block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight):
                    weight /= beta
        if "embedding_std" in case:  # the same draws, longer
            model.token_embedding.weight *= case["embedding_std"] / 0.02
        if case.get("no_position"):
            model.position_embedding.requires_grad_(False).weight.zero_()
    return model


def schedule_of(case):
    if case["schedule"] != "wsd":
        return warmed(case["warm"], case["schedule"])
    return lambda done: min(1.0, done / case["warm"], (1 - done) / DECAY + 1e-9)


def optimizer_of(model, case, lr):
    """The decay is 0.1 where an optimizer has a decoupled one."""
    if case["optimizer"] == "adamw8bit":
        return Adam8bit(list(model.parameters()), lr, case["power"])
    decay = 0.0 if case["optimizer"] in ("sgd", "adam", "lars") else 0.1
    config = OptimizerConfig(name=case["optimizer"], lr=lr, weight_decay=decay, trust=TRUST)
    optimizer = build_optimizer(model, config)
    if "embeddings_lr" in case:
        rate_of_embeddings(model, optimizer, case["embeddings_lr"] / lr)
    return optimizer


def rate_of_embeddings(model, optimizer, factor):
    """At each step the embeddings' rate is the others' times `factor`."""
    of_embeddings = {id(p) for name, p in model.named_parameters() if "embedding" in name}
    group = next(
        g for g in optimizer.param_groups if any(id(p) in of_embeddings for p in g["params"])
    )
    apart = [p for p in group["params"] if id(p) in of_embeddings]
    group["params"] = [p for p in group["params"] if id(p) not in of_embeddings]
    optimizer.add_param_group(group | {"params": apart})
    first = optimizer.param_groups[0]
    optimizer.register_step_pre_hook(
        lambda *_: optimizer.param_groups[-1].update(lr=first["lr"] * factor)
    )


def run(case, lr, seed):
    torch.manual_seed(seed)
    model, kind = build_model(case), case.get("format", "fp32")
    if FORMATS[kind]:
        round_products(model, FORMATS[kind])
    optimizer, scale = optimizer_of(model, case, lr), 2.0**16 if "loss scaling" in kind else 1.0
    sizes = {key: case[key] for key in ("steps", "batch", "length")}
    losses, skipped = train(
        model, optimizer, lr, seed=seed, schedule=schedule_of(case), loss_scale=scale, **sizes
    )
    result = {
        "val": held_out_loss(model, case["length"]).mean().item(),
        "losses": losses,
        "skipped": skipped,
    }
    if case.get("lengths"):
        by_place = {n: held_out_loss(model, n) for n in case["lengths"]}
        result["by_length"] = {n: losses.mean().item() for n, losses in by_place.items()}
        result["by_place"] = by_place[max(by_place)].view(-1, 16).mean(1).tolist()
    return result | {"parameters": model.num_parameters(), "state_bytes": state_bytes(optimizer)}


# Cases -------------------------------------------------------------------------------------------


def all_cases():
    """{topic: {name: case}}."""
    found = {
        topic: {}
        for topic in ("norms", "positions", "activations", "optimizers", "schedules", "formats")
    }
    norms = {
        "pre, layer": "layernorm",
        "pre, RMS": "rmsnorm",
        "deep": "deepnorm",
        "post": "deepnorm",
    }
    for name, norm in norms.items():
        shape = {"n_layer": 48, "d_model": 32, "n_head": 2, "norm": norm, "max_seq_len": 32}
        deep = {"length": 32, "batch": 8, "steps": 60, "model": shape, "post_norm": name == "post"}
        found["norms"][name] = deep
        found["norms"][f"{name}, 300 steps"] = deep | {"steps": 300, "searched": False}
    for name in ("learned", "sinusoidal", "rotary", "alibi", "t5", "shaw", "huang", "none"):
        shape = {
            "position": "learned" if name == "none" else name,
            "relative_distance": 32,
            "relative_buckets": 16,
        }
        case = {
            "model": shape,
            "no_position": name == "none",
            "lengths": [64, 128, 256],
            "steps": 250,
            "batch": 8,
        }
        found["positions"][name] = case
        if name == "sinusoidal":
            found["positions"]["sinusoidal, D^-0.5"] = case | {
                "embedding_std": SHAPE["d_model"] ** -0.5
            }
    for name in ("relu", "gelu", "silu", "reglu", "geglu", "swiglu"):
        shape = {
            "d_model": 48,
            "activation": name,
            "d_ff": 128 if "glu" in name else 192,
            "bias": False,
        }
        found["activations"][name] = {"model": shape, "steps": 250, "batch": 8}
    usual = {
        "sgd": 0.5,
        "adam": 2**-8,
        "adamw": 2**-8,
        "adafactor": 2**-5,
        "lars": 1.0,
        "lamb": 2**-6,
        "muon": 2**-7,
    }
    for batch, steps in ((8, 200), (64, 75)):
        sizes = {"batch": batch, "steps": steps}
        found["optimizers"] |= {
            f"{n}, batch {batch}": {"optimizer": n, "lr": lr, **sizes} for n, lr in usual.items()
        }
        found["optimizers"][f"adamw, embeddings 2^-5, batch {batch}"] = {
            "embeddings_lr": 2**-5,
            **sizes,
        }
        for name in ("adamw", "muon", "adamw, embeddings 2^-5"):
            found["optimizers"][f"{name}, batch {batch}"]["seeds"] = NINE
        for name, power in (("adamw8bit", 0.5), ("adamw8bit, even codes", 1.0)):
            case = {"optimizer": "adamw8bit", "power": power, **sizes}
            found["optimizers"][f"{name}, batch {batch}"] = case
    # AdamW's best rate
    only_one_change = found["optimizers"]["adamw, embeddings 2^-5, batch 8"] | {"searched": False}
    found["optimizers"]["adamw 2^-8, embeddings 2^-5, batch 8"] = only_one_change
    # Muon's best rate, and AdamW's for embeddings
    of_adamw = {"lr": 2**-5, "embeddings_lr": 2**-8, "searched": False}
    found["optimizers"]["muon 2^-5, embeddings 2^-8, batch 8"] = (
        found["optimizers"]["muon, batch 8"] | of_adamw
    )
    for schedule, warms in {"constant": (0.0, 0.1), "cosine": (0.0, 0.1), "wsd": (0.1,)}.items():
        for warm in warms:
            name = f"{schedule}, {'warm-up' if warm else 'no warm-up'}"
            found["schedules"][name] = {"schedule": schedule, "warm": warm, "batch": 8}
    for schedule in ("cosine", "wsd"):
        found["schedules"][f"{schedule}, half as long"] = {
            "schedule": schedule,
            "steps": 100,
            "warm": 0.2,
            "batch": 8,
        }
    found["formats"] = {name: {"format": name, "steps": 120} for name in FORMATS}
    for name in ("fp32", "mxfp4", "nvfp4", "control: products 0"):
        found["formats"][name]["seeds"] = NINE
    return found


def stored(folder, name, case, lr, seed):
    """A run's result, from its file if it is there."""
    file = folder / f"{name.replace(' ', '_').replace(',', '')}-{lr:.6g}-{seed}.json"
    if not file.is_file():
        begin = time.perf_counter()
        result = run(case, lr, seed) | {"seconds": round(time.perf_counter() - begin, 2)}
        write_whole(file, json.dumps(result))
    return json.loads(file.read_text())


def search(loss_at, start, most=9):
    """{rate: loss}, from `start` by factors of 2 until both neighbours of the best are worse."""
    tried = {start: loss_at(start)}
    while len(tried) < most:
        best = min(tried, key=tried.get)
        new = [lr for lr in (best * 2, best / 2) if lr not in tried]
        if not new:
            break
        tried[new[0]] = loss_at(new[0])
    return tried


def measure(job):
    folder, topic, name, case = job
    torch.set_num_threads(1)

    def loss_at(lr):
        val = stored(folder, f"{topic}-{name}", case, lr, SEARCH_SEED)["val"]
        return val if math.isfinite(val) else 99.0

    tried = search(loss_at, case["lr"]) if topic in SEARCHED and case.get("searched", True) else {}
    lr = min(tried, key=tried.get) if tried else case["lr"]
    runs = [stored(folder, f"{topic}-{name}", case, lr, seed) for seed in case.get("seeds", SEEDS)]
    print(
        topic,
        name,
        f"lr {lr:g}",
        *(f"{each['val']:.3f}" for each in runs),
        runs[0]["seconds"],
        flush=True,
    )
    return topic, name, summary(lr, tried, runs)


def summary(lr, tried, runs):
    """A choice's entry: what differs by seed as a list."""
    n_losses = min(len(each["losses"]) for each in runs)
    curve = torch.tensor([each["losses"][:n_losses] for each in runs]).mean(0)
    pieces = [piece.mean().item() for piece in curve.tensor_split(min(CURVE, n_losses))]
    keys = ("by_length", "by_place", "skipped")
    return {
        "lr": lr,
        "tried": {f"{rate:g}": round(loss, 3) for rate, loss in sorted(tried.items())},
        "val": [finite(each["val"]) for each in runs],
        "curve": [finite(piece) for piece in pieces],
        "parameters": runs[0]["parameters"],
        "state_bytes": runs[0]["state_bytes"],
        **{key: [each[key] for each in runs] for key in keys if key in runs[0]},
    }


def finite(value):
    return round(value, 4) if math.isfinite(value) else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--topics", nargs="+", choices=list(all_cases()), default=list(all_cases()))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    short, cases = {"steps": 3, "batch": 2} if args.quick else {}, all_cases()
    jobs = [
        (args.folder, topic, name, BASE | case | short)
        for topic in args.topics
        for name, case in cases[topic].items()
    ]
    result = {
        "machine": machine_facts(),
        "seeds": list(SEEDS),
        "topics": {topic: {} for topic in args.topics},
    }
    with get_context("spawn").Pool(args.processes) as pool:
        for topic, name, entry in pool.imap_unordered(measure, jobs):
            result["topics"][topic][name] = entry
    for topic in args.topics:  # in the order of the cases, whichever ended first
        result["topics"][topic] = {name: result["topics"][topic][name] for name in cases[topic]}
    write_whole(args.folder / "choices.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
