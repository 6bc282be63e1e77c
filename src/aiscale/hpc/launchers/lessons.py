"""What each launcher starts, and the ranks and GPU memory it needs, for any site.

The site's profile turns `ranks` and `gpu_memory_gb` into nodes and a constraint. The layout may depend on the number of
GPUs per node, since tensor parallelism should stay within a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = tuple[tuple[str, str], ...]  #: (key=value, the reason)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    name: str  #: of the file
    title: str
    about: str  #: at the head of the file
    work: str = "train"  #: the template of the job's commands
    recipe: str = ""
    steps: int = 0  #: of a submission as the file stands, a tenth of them warm-up; 0: all that the recipe has
    perplexity: float = 0  #: of the held-out text after all of the recipe's steps, published
    corpus: str = "stdlib"  #: the default of CORPUS; embedded is too short for windows of 2,048 tokens
    settings: Settings = ()
    layouts: Mapping[int, Settings] = field(default_factory=dict)  #: by GPUs per node; the next lower number is used
    variants: tuple[tuple[str, tuple[str, ...]], ...] = ()  #: for comparison: (what it is, key=value to add)
    exports: Settings = ()  #: (NAME=value, the reason): variables of the ranks
    ranks: int = 0  #: 0: one node
    on_cpus: int = 0  #: as many ranks on CPUs instead, on a part of a node, where the site has such parts
    gpu_memory_gb: float = 0  #: the least that a GPU must have
    hours: float = 0.5
    signal_s: int = 300  #: this long before the time limit, to save a checkpoint
    only: str = ""  #: the site that it is for, if not all

    @property
    def takes_days(self) -> bool:
        return self.hours > 2

    def layout(self, gpus: int) -> Settings:
        fitting = [count for count in self.layouts if count <= gpus]
        return self.settings + (self.layouts[max(fitting)] if fitting else ())


def _radius(size: str, title: str, density: str, perplexity: float, dense_steps: str, memory_gb: float) -> Lesson:
    """A published run of Radius, and the runs that it is compared with."""
    recipe = f"radius-{size}"
    dense = "compression.method=none"
    return Lesson(
        name=f"radius_{size}",
        title=f"Radius, {title}",
        about=f"Radius at density {density}, as published for 64 A100 of 80 GB: a new mask every 200 steps, dense "
        f"until step {dense_steps}, sent during the backward pass.",
        recipe=recipe,
        perplexity=perplexity,
        corpus="corpora/openwebtext",
        settings=(("loop.checkpoint_minutes=30", "what a node that fails may cost"),),
        variants=(
            ("Radius as published: one all-reduce after the backward pass", ("compression.overlap=false",)),
            ("the published baseline, dense", (dense, "compression.overlap=false")),
            ("DDP as it is today", (dense,)),
        ),
        ranks=64,
        gpu_memory_gb=memory_gb,
        hours=24,
    )


_BF16 = ("loop.precision=bf16", "the published script has fp16, which needs a loss scale; same speed")
_RECOMPUTED = ("model.activation_checkpointing=true", "forward passes twice, so that 40 GB suffice")
_MEGATRON = ("parallel.strategy=megatron", "tensor, pipeline and data parallelism")
_ZERO1 = ("parallel.distributed_optimizer=true", "optimizer states divided over data-parallel ranks, as in ZeRO-1")
_NO_LAST = ("loop.save_last=false", "12 bytes a parameter, from which no lesson goes on")
_ONE_CONNECTION = (("CUDA_DEVICE_MAX_CONNECTIONS=1", "Megatron-Core orders messages and kernels by it"),)

_LAMB = (
    ("optimizer.name=lamb", "as the authors"),
    ("optimizer.lr=0.008", "LAMB's, as published; no rate for AdamW"),
    ("optimizer.min_lr=6e-5", "as published"),
)


def _forge(size: str, ranks: int, steps: int, whole: str, *settings: tuple[str, str]) -> Lesson:
    """The beginning of a published run of FORGE, on as many GCDs."""
    return Lesson(
        name=f"forge_{size}",
        title=f"FORGE-{size.upper()}",
        about=f"Oak Ridge's model for science (Yin et al., SC'23), on {ranks} GCDs as published (at-aaims/forge, "
        f"plots.ipynb and train/configs/forge-{size}.yml), its first {steps} steps; all 15,300 would take {whole} "
        "node-hours at the published speed.",
        recipe=f"forge-{size}",
        steps=steps,
        settings=(*settings, _ZERO1, _NO_LAST),
        exports=_ONE_CONNECTION if _MEGATRON in settings else (),
        ranks=ranks,
        gpu_memory_gb=60,
        hours=0.75,
        only="frontier",
    )


_TP2 = ("parallel.tp=2", "as the authors; AdamW, since Megatron-Core has no LAMB")
_TP4 = ("parallel.tp=4", "theirs: 2, where weights and fp32 gradients alone take 67 GB")
_MICRO6 = ("loop.micro_batch=6", "theirs: 12, which would fill 61 of 64 GB here")
_MICRO8 = ("loop.micro_batch=8", "theirs: 16, which would fill 63 of 64 GB here")

LESSONS: dict[str, Lesson] = {
    lesson.name: lesson
    for lesson in (
        Lesson(
            name="ddp",
            title="DDP, GPT-2 XL",
            about="DistributedDataParallel: each GPU has the whole model and its own sequences.",
            recipe="gpt2-xl",
            steps=50,
            settings=(("loop.micro_batch=6", "of 480 sequences a step; fits 8, 16, 20, 40 and 80 ranks"), _RECOMPUTED),
            ranks=16,
            gpu_memory_gb=40,
        ),
        Lesson(
            name="zero",
            title="ZeRO-3, GPT-J 6B",
            about="DeepSpeed's ZeRO-3: parameters, gradients and optimizer states of GPT-J 6B divided over all GPUs.",
            recipe="gptj-6b-hf",
            steps=20,
            settings=(("parallel.zero_stage=3", "0 to 2 divide less, and need a GPU with more memory"),),
            ranks=32,
            gpu_memory_gb=40,
            hours=0.75,
        ),
        Lesson(
            name="fsdp",
            title="FSDP, GPT-2 XL",
            about="PyTorch's FSDP: transformers' GPT-2 XL, each GPU with a slice of every tensor.",
            recipe="gpt2-xl-hf",
            steps=50,
            settings=(("loop.micro_batch=6", "of 480 sequences a step; fits 8, 16, 20, 40 and 80 ranks"),),
            ranks=16,
            gpu_memory_gb=40,
        ),
        Lesson(
            name="3d_22b",
            title="3D parallelism, 22B",
            about="Megatron-Core: 48 layers of 6144, each matrix on 4 GPUs and the layers in 8 stages.",
            recipe="22b",
            steps=50,
            exports=_ONE_CONNECTION,
            settings=(
                _MEGATRON,
                ("parallel.tp=4", "every matrix on 4 GPUs of one node"),
                ("parallel.pp=8", "6 of 48 layers in a stage; whole multiples of tp x pp = 32 ranks fit"),
                _ZERO1,
                _BF16,
                _NO_LAST,
            ),
            ranks=32,
            gpu_memory_gb=40,
        ),
        Lesson(
            name="3d_175b",
            title="3D parallelism, 175B",
            about="Megatron-Core: GPT-3's shape, 96 layers of 12288, 175 billion parameters on 96 GPUs.",
            recipe="175b",
            steps=30,
            exports=_ONE_CONNECTION,
            settings=(_MEGATRON, _ZERO1, _BF16, _NO_LAST),
            layouts={
                8: (
                    ("parallel.tp=8", "every matrix on the 8 GPUs of one node"),
                    ("parallel.pp=12", "8 of 96 layers in a stage; whole multiples of tp x pp = 96 ranks fit"),
                ),
                4: (
                    ("parallel.tp=4", "every matrix on the 4 GPUs of one node"),
                    ("parallel.pp=24", "4 of 96 layers in a stage; whole multiples of tp x pp = 96 ranks fit"),
                ),
            },
            ranks=96,
            gpu_memory_gb=60,
            hours=0.75,
            signal_s=900,
        ),
        _forge("s", 256, 20, "2,200", *_LAMB),
        _forge("m", 672, 10, "20,000", _MEGATRON, _TP2, _MICRO6),
        _forge("l", 512, 10, "36,000", _MEGATRON, _TP4, _MICRO8),
        _radius("355m", "GPT-355M", "0.5", 14.31, "80,000", 40),
        _radius("2b", "GPT-2.0B", "0.4", 11.41, "60,000", 60),
        Lesson(
            name="scaling",
            title="Scaling study",
            about="GPT-2 medium by DDP on 1, 2, 4, ... nodes of one job: weak scaling (the same work for each GPU) and "
            "strong scaling (the same work altogether).",
            work="scaling",
            recipe="gpt2-medium",
            ranks=32,
            gpu_memory_gb=40,
            hours=0.75,
        ),
        Lesson(
            name="study",
            title="A study of one node",
            about="Which precision, batch, size, strategy? GPT-2 on the GPUs of a node, one setting changed at a time.",
            work="study",
        ),
        Lesson(
            name="notebook",
            title="A notebook in a batch job",
            about="Runs a lesson from first cell to last, without a browser; it starts its own ranks, on CPUs.",
            work="notebook",
            on_cpus=4,
        ),
        Lesson(
            name="your_own",
            title="Your own script",
            about="Starts a train.py written for torchrun, with the variables that it expects.",
            work="your_own",
            ranks=16,
        ),
        Lesson(
            name="engines",
            title="Engines for a notebook on the login node",
            about="A rank for each GPU, which a notebook outside the job drives with %%px cells.",
            work="engines",
            ranks=16,
            hours=0.75,
        ),
    )
}
