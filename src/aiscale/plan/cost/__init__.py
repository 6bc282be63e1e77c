"""Formulas for what a training run needs: parameters, FLOPs, bytes held and sent, seconds.

No torch.

    cost.parameters(model)                        # {"token_embedding": ..., "mlp": ..., ...}
    cost.flops_per_token(model, seq_len=1024)     # forward and backward
    cost.training_bytes(model, batch=8, seq_len=1024, precision="bf16")
    cost.wire_bytes("all_reduce", nbytes, world)  # what one rank sends
    cost.fit_alpha_beta(nbytes, seconds, "all_reduce", world).seconds("all_reduce", 2**20, world)
    cost.collective_seconds("all_reduce", nbytes, machine, ranks=64).seconds  # machine: catalogue's

`meter` measures the same quantities under the same names; the notebooks compare the two.
"""

from aiscale.plan.cost.collectives import collective_seconds
from aiscale.plan.cost.communication import (
    COLLECTIVES,
    AlphaBeta,
    all_reduce_wire_bytes,
    collective_terms,
    fit_alpha_beta,
    wire_bytes,
)
from aiscale.plan.cost.compression import (
    gradient_traffic,
    mean_payload_bytes,
    radius_held,
    wire_entry_bytes,
)
from aiscale.plan.cost.megatron import megatron_activation_bytes_by_part
from aiscale.plan.cost.memory import (
    CATEGORIES,
    activation_bytes,
    korthikanti_activation_bytes,
    model_state_bytes,
    training_bytes,
    zero_state_bytes,
)
from aiscale.plan.cost.parameters import (
    flops_by_part,
    flops_per_token,
    layer_parameters,
    parameter_count,
    parameter_shapes,
    parameter_tensors,
    parameters,
    six_n_flops_per_token,
)
from aiscale.plan.cost.schedules import (
    Work,
    bubble,
    idle_share,
    in_flight,
    pipeline_timeline,
    schedule_order,
    stage_ranks,
)
from aiscale.plan.cost.strategies import held_bytes, step_bytes, step_traffic
from aiscale.plan.cost.timelines import Event, ddp_timeline, prefetch_timeline
