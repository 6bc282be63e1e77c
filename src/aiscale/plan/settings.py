"""A planned layout as settings of a `Run`, so that what was planned is what a launcher starts.

run, answer = runnable(recipe("forge-m"), found)     # the best layout that aiscale's own strategies can run
settings_of(answer.layout)                           # ("parallel.strategy=megatron", "parallel.tp=2", ...)
"""

from __future__ import annotations

from collections.abc import Iterable

from aiscale.config import ConfigError, Run
from aiscale.plan.answer import Answer
from aiscale.plan.layout import Layout


def settings_of(layout: Layout) -> tuple[str, ...]:
    """Raises ConfigError for what no strategy of aiscale has: context parallelism, offload beside a pipeline."""
    if layout.cp > 1 or layout.offload:
        raise ConfigError(f"{layout.name()}: aiscale trains without cp and, beside tp and pp, without offload")
    common = (
        f"parallel.dp={layout.dp}",
        f"loop.micro_batch={layout.micro_batch}",
        f"loop.global_batch={layout.global_batch}",
        f"loop.precision={layout.precision}",
        f"model.activation_checkpointing={str(layout.recompute == 'full').lower()}",
    )
    if layout.fsdp:
        return ("parallel.strategy=fsdp", *common)
    if layout.tp * layout.pp * layout.ep == 1:
        return ("parallel.strategy=zero", f"parallel.zero_stage={layout.zero_stage}", *common)
    flags = {"sequence_parallel": layout.sequence_parallel, "distributed_optimizer": layout.zero_stage == 1}
    sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    sizes |= {"virtual_stages": layout.virtual_stages, "schedule": layout.schedule}
    options = {**sizes, **{name: str(flag).lower() for name, flag in flags.items()}}
    return ("parallel.strategy=megatron", *(f"parallel.{name}={value}" for name, value in options.items()), *common)


def runnable(run: Run, answers: Iterable[Answer]) -> tuple[tuple[str, ...], Answer]:
    """The settings of the first of these layouts that this run accepts."""
    why = "no layout fits"
    for answer in answers:
        try:
            settings = settings_of(answer.layout)
            run.override(*settings).check_world(answer.layout.gpus)
        except ConfigError as error:
            why = str(error)
        else:
            return settings, answer
    raise ConfigError(f"no layout that fits can be started by aiscale; of the last: {why}")
