"""A GPT: embeddings, L blocks of attention and MLP on a residual stream, an output head.

    model = GPT(ModelConfig(n_layer=6, n_head=6, d_model=384, vocab_size=256, max_seq_len=256))
    loss = model(tokens, targets)    # training: the mean cross-entropy, a scalar
    logits = model(tokens)           # a score for every vocabulary entry at every position

The model knows nothing of processes: a strategy of `parallel` transforms it from outside. It can be
built on the meta device without memory; `to_empty` and `init_weights` then fill it, or `draw` hands
out its weights tensor by tensor, to a rank that keeps a part of them.

Shapes: B batch, T tokens, D width, H heads, G key/value heads, C width of a head (D = H C), F width
of the MLP's hidden layer, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aiscale.errors import ConfigError
from aiscale.lesson.model.positions import distance_scores, place, rotate, sinusoids
from aiscale.plan.config import ModelConfig
from aiscale.plan.config.choices import ACTIVATIONS as CHOICES

ACTIVATIONS = {
    # GPT-2's: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config: ModelConfig) -> nn.Module:
    """Layer norm (subtract the mean, divide by the standard deviation) or RMS norm (only divide).
    DeepNorm is a layer norm too, at another place (`Block`)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Causal self-attention: softmax(q k^T / sqrt(C)) v in H heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.kv_heads, self.d_head = config.n_head, config.kv_heads, config.d_head
        # One product computes queries, keys and values of all heads: weight rows [H C | G C | G C].
        rows = (config.n_head + 2 * config.kv_heads) * config.d_head
        self.qkv = nn.Linear(config.d_model, rows, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.position = config.position
        if self.position in ("shaw", "huang"):  # a vector for each distance, the same for all heads
            self.distance_embedding = nn.Embedding(config.relative_distance + 1, config.d_head)

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """x (B,T,D) -> (B,T,D); where: from `positions.place`."""
        B, T, D = x.shape
        widths = [heads * self.d_head for heads in (self.n_head, self.kv_heads, self.kv_heads)]
        # Split before the transpose, so that the backward pass copies the three gradients once.
        q, k, v = (
            part.view(B, T, -1, self.d_head).transpose(1, 2)
            for part in self.qkv(x).split(widths, dim=-1)
        )
        if self.position == "rotary" and where is not None:
            q, k = rotate(q, where), rotate(k, where)
        if self.position in ("shaw", "huang"):
            table, of_keys = self.distance_embedding.weight, self.position == "huang"
            where = distance_scores(q, k, table, where, of_keys=of_keys)
        mask = None if self.position == "rotary" else where  # (T,T), or broadcast to (B,H,T,T)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=self.kv_heads != self.n_head,
        )
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Each token separately: D -> F, a nonlinearity, F -> D."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[CHOICES[config.activation].function], config.gated
        # A gate needs two products of the input: one matrix with rows [gate | value].
        rows = config.ff_width * (2 if self.gated else 1)
        self.up = nn.Linear(config.d_model, rows, bias=config.bias)
        self.down = nn.Linear(config.ff_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B,T,D) -> (B,T,D)."""
        x = self.up(x)  # (B,T,F), or (B,T,2F) with a gate
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            return self.down(self.activation(gate) * value)
        return self.down(self.activation(x))


class Block(nn.Module):
    """One layer: attention and MLP each read a normed copy of the residual stream and add to it.

    With DeepNorm (Wang et al. 2022) they read the stream itself, and LN(alpha x + f(x)) goes on,
    alpha = (2 L)^(1/4): 1000 layers train.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.alpha = (2 * config.n_layer) ** 0.25 if config.norm == "deepnorm" else None
        self.attn_norm, self.attn = make_norm(config), Attention(config)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """x (B,T,D) -> (B,T,D)."""
        if self.alpha is not None:
            x = self.attn_norm(self.alpha * x + self.attn(x, where))
            return self.mlp_norm(self.alpha * x + self.mlp(x))
        attended = self.attn(self.attn_norm(x), where)
        if self.parallel_residual:
            return x + attended + self.mlp(self.mlp_norm(x))
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer of `config`'s shape; weights: from torch's global generator."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # shapes only: torch's default initialization would be wasted
            self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
            if config.position == "learned":
                self.position_embedding = nn.Embedding(config.max_seq_len, config.d_model)
            if config.position == "t5":
                self.relative_embedding = nn.Embedding(config.relative_buckets, config.n_head)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            # With DeepNorm the last block has normed.
            self.norm = nn.Identity() if config.norm == "deepnorm" else make_norm(config)
            if not config.tied:
                self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's initialization: weights from N(0, 0.02), biases 0, norms 1.

        The two layers of each block that add to the residual stream are scaled by 1 / sqrt(2 L), so
        that its variance does not grow with depth. DeepNorm's own: Xavier's, and times
        beta = (8 L)^(-1/4) for the MLP, attention's values and its output.
        """
        for name, parameter in self.named_parameters():
            self._init(name, parameter)

    def draw(self, take: Callable[[str, Tensor], None]) -> None:
        """Call take(name, weight) for each parameter with its initial weights, in fp32 on the CPU.

        They are those of `init_weights`, but one tensor is in memory at a time. This model may lie
        on the meta device.
        """
        for name, parameter in self.named_parameters():
            weight = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            self._init(name, weight)
            take(name, weight)
            # Else it would live until the next one is drawn.
            del weight

    def _init(self, name: str, weight: Tensor) -> None:
        if weight.dim() == 1:
            weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        adds_to_stream = name.endswith(("attn.out.weight", ".down.weight"))
        scale = (2 * self.config.n_layer) ** 0.5 if adds_to_stream else 1
        nn.init.normal_(weight, std=0.02 / scale)
        in_block = name.startswith("blocks.") and "embedding" not in name
        if self.config.norm == "deepnorm" and in_block:
            self._init_deepnorm(name, weight)

    def _init_deepnorm(self, name: str, weight: Tensor) -> None:
        beta, kv = (8 * self.config.n_layer) ** -0.25, self.config.kv_heads * self.config.d_head
        parts = [weight] if "qkv" not in name else weight.split([self.config.d_model, kv, kv])
        for part in parts[:-1]:
            nn.init.xavier_normal_(part)
        for part in parts[-1].chunk(2 if self.config.gated and ".up." in name else 1):
            nn.init.xavier_normal_(part, gain=beta)

    @property
    def head_weight(self) -> Tensor:
        """The output head (V,D); with tied weights the token embedding."""
        return self.token_embedding.weight if self.config.tied else self.head.weight

    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B,T) -> the residual stream after the last norm (B,T,D)."""
        if tokens.shape[1] > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens, but model.max_seq_len is "
                f"{self.config.max_seq_len}: cut it, or lengthen the second"
            )
        x, where = self.embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        recompute = self.config.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, where, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, where)
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the blocks (B,T,D), and what `place` returns.

        tokens (B,T), positions (T,). The second tells the blocks where tokens stand.
        """
        try:
            x = self.token_embedding(tokens)
        except IndexError:  # cheaper than checking all tokens before every step
            raise ConfigError(
                f"tokens run from {int(tokens.min())} to {int(tokens.max())}, but model.vocab_size "
                f"{self.config.vocab_size} ends at {self.config.vocab_size - 1}: raise it, or use "
                "the tokenizer that the model was made for"
            ) from None
        if self.config.position == "learned":
            x = x + self.position_embedding(positions)
        elif self.config.position == "sinusoidal":  # Vaswani et al. 2017, sections 3.4 and 3.5
            x = x * self.config.d_model**0.5 + sinusoids(positions, self.config.d_model, x.dtype)
        table = self.relative_embedding.weight if self.config.position == "t5" else None
        return x, place(positions, self.config, x.dtype, table)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens (B,T) -> logits (B,T,V).

        With targets (B,T), the mean cross-entropy in nats, a scalar.
        """
        x = self.hidden(tokens)
        if targets is None:
            return F.linear(x, self.head_weight)
        logits = F.linear(x, self.head_weight).flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), targets.flatten())
