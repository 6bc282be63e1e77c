"""Closed formulas for what a training run needs: parameters, FLOPs, bytes held, bytes sent, seconds. No torch.

    cost.parameters(model)                        # {"token_embedding": ..., "attention": ..., "mlp": ..., ...}
    cost.flops_per_token(model, seq_len=1024)     # forward and backward
    cost.training_bytes(model, batch=8, seq_len=1024, precision="bf16")
    cost.wire_bytes("all_reduce", nbytes, world)  # what one rank sends
    cost.fit_alpha_beta(nbytes, seconds, "all_reduce", world).seconds("all_reduce", 2**20, world)

`meter` measures the same quantities under the same names, and the notebooks set the two side by side.
"""

from aiscale.cost.communication import (
    COLLECTIVES,
    Link,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    collective_seconds,
    collective_terms,
    fit_alpha_beta,
    gloo_reduce_wire_bytes,
    reduce_scatter_wire_bytes,
    wire_bytes,
)
from aiscale.cost.compression import (
    is_dense_step,
    kept_entries,
    mean_payload_bytes,
    radius_held,
    radius_traffic,
    sent_entries,
    wire_entry_bytes,
)
from aiscale.cost.conventions import CONVENTIONS, Convention, difference
from aiscale.cost.data_parallel import (
    DDPStep,
    Event,
    ddp_step_seconds,
    ddp_timeline,
    efficiency,
    scaled_lr,
    scaling_seconds,
    speedup,
)
from aiscale.cost.flops import flops_by_part, flops_per_token, six_n_flops_per_token
from aiscale.cost.held import held_bytes
from aiscale.cost.megatron_activations import megatron_activation_bytes, megatron_activation_bytes_by_part
from aiscale.cost.memory import (
    CATEGORIES,
    activation_bytes,
    activation_bytes_by_part,
    korthikanti_activation_bytes,
    model_state_bytes,
    slide_bytes_per_parameter,
    training_bytes,
    zero_state_bytes,
)
from aiscale.cost.parameters import (
    approximate_parameter_count,
    block_shapes,
    layer_parameters,
    matmul_parameters,
    parameter_count,
    parameter_shapes,
    parameter_tensors,
    parameters,
)
from aiscale.cost.pipeline import (
    Work,
    bubble,
    event_name,
    idle_share,
    in_flight,
    pipeline_timeline,
    schedule_order,
    stage_ranks,
)
from aiscale.cost.prefetch import prefetch_timeline
from aiscale.cost.traffic import step_traffic

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "CONVENTIONS",
    "Convention",
    "DDPStep",
    "Event",
    "Link",
    "Work",
    "activation_bytes",
    "activation_bytes_by_part",
    "all_gather_wire_bytes",
    "all_reduce_wire_bytes",
    "approximate_parameter_count",
    "block_shapes",
    "broadcast_wire_bytes",
    "bubble",
    "collective_seconds",
    "collective_terms",
    "ddp_step_seconds",
    "ddp_timeline",
    "difference",
    "efficiency",
    "event_name",
    "fit_alpha_beta",
    "flops_by_part",
    "flops_per_token",
    "gloo_reduce_wire_bytes",
    "held_bytes",
    "idle_share",
    "in_flight",
    "is_dense_step",
    "kept_entries",
    "korthikanti_activation_bytes",
    "layer_parameters",
    "matmul_parameters",
    "mean_payload_bytes",
    "megatron_activation_bytes",
    "megatron_activation_bytes_by_part",
    "model_state_bytes",
    "parameter_count",
    "parameter_shapes",
    "parameter_tensors",
    "parameters",
    "pipeline_timeline",
    "prefetch_timeline",
    "radius_held",
    "radius_traffic",
    "reduce_scatter_wire_bytes",
    "scaled_lr",
    "scaling_seconds",
    "schedule_order",
    "sent_entries",
    "six_n_flops_per_token",
    "slide_bytes_per_parameter",
    "speedup",
    "stage_ranks",
    "step_traffic",
    "training_bytes",
    "wire_bytes",
    "wire_entry_bytes",
    "zero_state_bytes",
]
