"""Deliberate bugs that tests of `aiscale verify` plant: a replaced line of a trainer, or near it.

`planted(fault, folder)` makes a copy of the package with the fault, and the case that must see it.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from aiscale.measure.cases import CASES, Case

PACKAGE = Path(__file__).parents[1] / "src/aiscale"


@dataclass(frozen=True)
class Fault:
    """A line of a file in aiscale/train, and what replaces it."""

    name: str
    case: str
    file: str
    old: str
    new: str


#: Megatron-Core's function of a module, replaced before it is imported from there.
MEGATRON = "from megatron.core import parallel_state, tensor_parallel"
FINALIZE = "from megatron.core.distributed import finalize_model_grads"
MEMBERS = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
KEPT = f"""{MEMBERS}
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

def keep(self, output_tensor, input_tensor, group, op, async_op=False):
    output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

DefaultReduceScatter.__call__ = keep"""
SUMMED = """draw(model, args, device)
    for part in (*model.blocks, model):
        part.set_gradient_divide_factor(1.0)"""
UNREDUCED = f"""{MEGATRON}
from megatron.core.tensor_parallel import mappings
mappings._reduce = lambda tensor, group: tensor"""
UNTIED = f"""{FINALIZE}
import sys
sys.modules["megatron.core.distributed.finalize_model_grads"]._allreduce_word_embedding_grads = (
    lambda *args, **kwargs: None)"""
MODEL = "optimizer = get_megatron_optimizer(adam, model, use_gloo_process_groups=False)"
EXPERTS_DIVIDED = f"""{MODEL}
    for buffer in model[0].expert_parallel_buffers:
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor /= 2"""
CLIPPED = "        optimizer.step()"
DOUBLED = """        for weight in model.parameters():
            weight.grad *= 2
        optimizer.step()"""
DRAWN = "part.copy_(numbers(name, start, part.shape, weight.shape))"
NO_SYNC = "with nullcontext() if last else model.no_sync():"
SPLIT = "batch.to(device).split(args.micro_batch)"
AVERAGED = "dist.all_reduce(loss, dist.ReduceOp.AVG)"
QKV = "for part in (self.query, self.key, self.value)"
NEXT_RATE = "rate(step + 1, self.args)"
DIVIDED = "cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())"
NO_DECAY = '{"params": vectors, "weight_decay": 0.0}'
DECAY = '{"params": vectors, "weight_decay": args.weight_decay}'

NONE = Fault("none", "ddp-x2", "ddp.py", "", "")
#: One of each library.
FIRST = (
    Fault("all-reduce-skipped", "ddp-x2", "ddp.py", NO_SYNC, "with model.no_sync():"),
    Fault("decay-applied-to-biases", "zero3-x2", "optimizer.py", NO_DECAY, DECAY),
    Fault("tensor-parallel-reduction-dropped", "megatron-tp2", "megatron.py", MEGATRON, UNREDUCED),
)
#: The same, of each trainer and each thing that can go wrong.
MORE = (
    Fault("shards-not-reduced", "fsdp-x2", "fsdp.py", MEMBERS, KEPT),
    Fault(
        "gradient-times-the-world-size", "fsdp-x2", "fsdp.py", "draw(model, args, device)", SUMMED
    ),
    # In fp32 gloo lacks the operation that FSDP2 takes for a factor of its own.
    Fault(
        "gradient-times-the-world-size",
        "fsdp-x2-fp32",
        "fsdp.py",
        "part.backward()",
        "(world_size * part).backward()",
    ),
    Fault("gradient-doubled", "ddp-x2", "ddp.py", "part.backward()", "(2 * part).backward()"),
    Fault("gradient-doubled-after-clipping", "ddp-x2", "ddp.py", CLIPPED, DOUBLED),
    Fault("loss-divided-by-the-wrong-n", "ddp-x2", "model.py", DIVIDED, f"{DIVIDED} * 0.999"),
    Fault("loss-divided-by-the-wrong-n", "tp_pp-pp2", "model.py", DIVIDED, f"{DIVIDED} * 0.999"),
    Fault(
        "micro-batches-divided-by-the-wrong-n",
        "ddp-x2-accumulated",
        "ddp.py",
        "/ len(micro_batches)",
        "/ (len(micro_batches) + 1)",
    ),
    Fault("a-micro-batch-dropped", "ddp-x2-accumulated", "ddp.py", SPLIT, f"{SPLIT}[1:]"),
    Fault(
        "the-same-share-on-each-rank", "zero2-x2", "data.py", "[rank::world_size]", "[::world_size]"
    ),
    Fault(
        "tied-embedding-gradient-not-reduced", "megatron-pp2", "megatron_model.py", FINALIZE, UNTIED
    ),
    Fault(
        "query-and-key-swapped",
        "ddp-x2",
        "model.py",
        QKV,
        QKV.replace("query, self.key", "key, self.query"),
    ),
    Fault(
        "qkv-rows-in-the-wrong-order",
        "megatron-tp2",
        "megatron_weights.py",
        'zip(("query", "key", "value"), rows)',
        'zip(("value", "key", "query"), rows)',
    ),
    Fault(
        "all-ranks-have-the-first-experts",
        "megatron-mixture-ep2",
        "megatron_weights.py",
        "parallel_state.get_expert_model_parallel_rank()",
        "0",
    ),
    Fault(
        "experts-gradients-divided-once-more",
        "megatron-mixture-ep2",
        "megatron.py",
        MODEL,
        EXPERTS_DIVIDED,
    ),
    Fault("decay-applied-to-biases", "ddp-x2", "optimizer.py", NO_DECAY, DECAY),
    Fault("decay-applied-to-biases", "megatron-tp2", "megatron.py", ' * group["wd_mult"]', ""),
    Fault("learning-rate-off-by-one-step", "ddp-x2", "job.py", "rate(step, self.args)", NEXT_RATE),
    Fault(
        "one-wrong-weight",
        "ddp-x2",
        "model.py",
        DRAWN,
        f'{DRAWN}\n        part.view(-1)[5] += 1e-3 * (name == "blocks.0.up.weight")',
    ),
    Fault("a-rank-reports-its-own-loss", "fsdp-x2", "fsdp.py", AVERAGED, "pass"),
    Fault(
        "rank-0-evaluates-alone",
        "ddp-x2",
        "job.py",
        "dist.all_reduce(mean, dist.ReduceOp.AVG)",
        "pass",
    ),
    Fault(
        "data-parallel-average-dropped",
        "tp_pp-pp2-dp2",
        "tp_pp.py",
        "dist.all_reduce(mine, dist.ReduceOp.AVG, group=data)",
        "pass",
    ),
    Fault("norm-of-the-own-part", "tp_pp-tp2", "tp_pp.py", "g.full_tensor() if", "g.to_local() if"),
    Fault(
        "lamb-by-the-norm-of-a-slice",
        "fsdp-x2-lamb",
        "optimizer.py",
        "norm.full_tensor() if",
        "norm.to_local() if",
    ),
    Fault(
        "unsent-gradients-forgotten",
        "radius-sparse-x3",
        "radius.py",
        "self.residual.update(zip(parameters, kept))",
        "pass",
    ),
    Fault(
        "mask-by-the-mean-gradient",
        "radius-sparse-x3",
        "radius.py",
        "(mean / (square.sqrt() + 1e-8)).abs()",
        "mean.abs()",
    ),
)


def planted(fault: Fault, folder: Path) -> Case:
    """The fault's case, of a copy of the package with the fault. Its name is CASE--FAULT."""
    name = f"{fault.case}--{fault.name}"
    shutil.copytree(
        PACKAGE, folder / name / "aiscale", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = folder / name / "aiscale/train" / fault.file
    text = file.read_text()
    assert fault.old in text, (
        f"{fault.file} has no line {fault.old}: {fault.name} cannot be planted"
    )
    file.write_text(text.replace(fault.old, fault.new, 1))
    reference = CASES[fault.case].reference
    return dataclasses.replace(
        CASES[fault.case], name=name, source=str(folder / name), compared_with=reference
    )
