"""Graders of the exercises on one process: torch's attention, its layers, its AdamW, its counter of operations."""

import importlib.util
import random

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same

# 01.a ---------------------------------------------------------------------------------------------------------------

layer = Gap(
    "01.a",
    "The layer",
    "model.py",
    minutes=8,
    runs="train.py",
    ranks=1,
    against_ours=True,
    hints=[
        "`h = self.norm1(x)` goes through `self.query`, `self.key` and `self.value`; each becomes (B, H, T, D / H).",
        "After attention `transpose(1, 2)` and `flatten(2)` bring back (B, T, D) for `self.out`. Add the result to x: "
        "this sum is what `self.norm2` reads.",
        "The last line: `return x + self.down(gelu(self.up(self.norm2(x))))`.",
    ],
    solution="""
        h = self.norm1(x)
        q, k, v = (  # (B, H, T, D / H)
            part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))
    """,
)


def forward(
    block,
    x,
    kept=True,
    causal=True,
    heads="heads",
    back=True,
    out=True,
    mlp=gelu,
    first=None,
    read=None,
    order=(0, 1, 2),
):
    """A layer's result with one mistake, or none. `first`, `read`: what is added to, what the MLP reads."""
    h = block.norm1(x)
    parts = [(block.query, block.key, block.value)[i](h) for i in order]
    width = {"heads": (-1, block.head_width), "one": (1, -1), "turned": (block.head_width, -1), "tokens": None}[heads]
    if width is None:  # the dims of tokens and heads not exchanged
        attended = scaled_dot_product_attention(
            *(part.unflatten(-1, (-1, block.head_width)) for part in parts), is_causal=causal
        ).transpose(1, 2)
    else:
        attended = scaled_dot_product_attention(
            *(part.unflatten(-1, width).transpose(1, 2) for part in parts), is_causal=causal
        )
    joined = attended.transpose(1, 2).flatten(2) if back else attended.reshape(x.shape)
    made = block.out(joined) if out else joined
    x_after = {None: x, "nothing": 0, "normed": h}[first] + made
    read_by_mlp = {None: block.norm2(x_after), "plain": x_after, "old": block.norm2(x)}[read]
    return kept * x_after + block.down(mlp(block.up(read_by_mlp)))


MISTAKES = {
    "each token sees later ones as well: attention is not causal": {"causal": False},
    "one head reads the whole width: the heads are not separated": {"heads": "one"},
    "the heads are cut the other way: the numbers of a head lie side by side": {"heads": "turned"},
    "heads attend to each other in place of tokens: exchange the two dims with transpose(1, 2)": {"heads": "tokens"},
    "the heads come back in another order: transpose(1, 2) before flatten(2)": {"back": False},
    "query and key are exchanged": {"order": (1, 0, 2)},
    "key and value are exchanged": {"order": (0, 2, 1)},
    "`self.out` is missing": {"out": False},
    "x is not added to what attention makes": {"first": "nothing"},
    "attention's result is added to the normed x, not to x": {"first": "normed"},
    "x is not added to what the MLP makes": {"kept": False},
    "gelu is missing between up and down": {"mlp": lambda x: x},
    "this is relu, and the drawing has GELU": {"mlp": torch.relu},
    "the MLP reads its input without a norm": {"read": "plain"},
    "the MLP reads the layer's input, not the sum after attention": {"read": "old"},
}


@layer.look
def the_layer_alone(folder):
    spec = importlib.util.spec_from_file_location("model_of_a_try", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block, x = module.Block(12, 3).double(), torch.randn(2, 5, 12).double()
    with torch.no_grad():
        for norm in (block.norm1, block.norm2):
            norm.weight.mul_(1.5)
        for weight in block.parameters():
            weight.mul_(3)  # so that no mistake hides
        kept = x.clone()
        try:
            found = block(x)
        except Exception as error:
            require(False, f"`forward` stops, for x of shape {tuple(x.shape)}: {type(error).__name__}: {error}")
        require(found is not None, "`forward` returns nothing")
        require(torch.equal(kept, x), "`forward` changes x itself: write x = x + ..., not x += ...")
        causes = {words: forward(block, x, **mistake) for words, mistake in MISTAKES.items()}
        same(found, forward(block, x), "the layer's result", causes=causes, rtol=1e-9)


def _layer(*changes):
    lines = layer.lines
    for old, new in changes:
        assert old in lines, old
        lines = lines.replace(old, new)
    return lines


layer.refuses("no mask", "attention is not causal", _layer((", is_causal=True", "")))
layer.refuses("one head", "heads are not separated", _layer(("(-1, self.head_width)", "(1, -1)")))
layer.refuses(
    "heads cut the other way", "cut the other way", _layer(("(-1, self.head_width)", "(self.head_width, -1)"))
)
layer.refuses(
    "heads for tokens",
    "heads attend to each other",
    _layer((".transpose(1, 2) for", " for"), ("attended.transpose(1, 2).flatten(2)", "attended.flatten(2)")),
)
layer.refuses(
    "reshaped, not transposed",
    "in another order",
    _layer(("attended.transpose(1, 2).flatten(2)", "attended.reshape(x.shape)")),
)
layer.refuses(
    "flattened, not transposed",
    "stops, for x of shape",
    _layer(("attended.transpose(1, 2).flatten", "attended.flatten")),
)
layer.refuses(
    "without out",
    "`self.out` is missing",
    _layer(("self.out(attended.transpose(1, 2).flatten(2))", "attended.transpose(1, 2).flatten(2)")),
)
layer.refuses("no sum at attention", "not added to what attention", _layer(("x = x + self.out", "x = self.out")))
layer.refuses("the normed x", "added to the normed x", _layer(("x = x + self.out", "x = h + self.out")))
layer.refuses("no sum at the MLP", "not added to what the MLP", _layer(("return x + self.down", "return self.down")))
layer.refuses("no GELU", "gelu is missing", _layer(("gelu(self.up(self.norm2(x)))", "self.up(self.norm2(x))")))
layer.refuses("no second norm", "without a norm", _layer(("self.norm2(x)", "x")))
layer.refuses("no return", "returns nothing", _layer(("return x +", "x = x +")))
layer.refuses("in place", "changes x itself", _layer(("x = x + self.out", "x += self.out")))
layer.refuses(
    "query for key", "query and key are exchanged", _layer(("(self.query, self.key,", "(self.key, self.query,"))
)

# 01.b ---------------------------------------------------------------------------------------------------------------

step = Gap(
    "01.b",
    "A step",
    "train.py",
    minutes=8,
    ranks=1,
    against_ours=True,
    explained={
        "does not require grad": "backward needs the loss with its graph: detach() is for the sum that is printed",
        "backward through the graph a second time": "each micro-batch has a graph, and one backward pass",
        "can't be converted to Scalar": "a loss of each byte, not their mean: is it loss_of's?",
    },
    hints=[
        "For each micro-batch: the model's answer to `micro_batch[:, :-1]`, its loss against `micro_batch[:, 1:]`, and "
        "`backward()`. Gradients add up, so of what is the sum a mean?",
        "Divide each loss by `len(micro_batches)` before `backward()`, and add it to `loss` without its graph.",
        "After the loop, once a step: clip, `optimizer.step()`, `optimizer.zero_grad()`, in this order.",
    ],
    solution="""
        for micro_batch in micro_batches:
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    """,
)


@step.demand
def a_step_has_micro_batches(tried):
    pieces = tried.micro_batches  # of the first step of the optimizer
    require(pieces > 0, "the optimizer takes a step, and no backward pass has made a gradient")
    require(pieces <= 8, "the optimizer takes no step")
    apart = "the optimizer takes a step after each micro-batch: one is enough, after the loop"
    require(pieces == 8 or not tried.verdict.unknown, apart)
    require(pieces == 8, f"the batch is computed in {pieces} pieces, and --micro-batch makes 8: memory is for those")


def _step(*changes):
    lines = step.lines
    for old, new in changes:
        assert old in lines, old
        lines = lines.replace(old, new)
    return lines


_CLIP, _STEP, _ZERO = step.lines.splitlines()[-3:]
step.refuses("the gradients stay", "zero_grad()", _step((_ZERO, "")))
step.refuses("no division", "not divided by their number", _step((" / len(micro_batches)", "")))
step.refuses("divided by the batch", "scaled otherwise", _step(("len(micro_batches)", "len(batch)")))
step.refuses("zero_grad in the loop", "zero_grad()", _step(("    part = ", "    optimizer.zero_grad()\n    part = ")))
step.refuses(
    "a step for each micro-batch",
    "after each micro-batch",
    _step((_STEP, ""), ("    loss +=", "    optimizer.step()\n    loss +=")),
)
step.refuses("not clipped", "is it clipped", _step((_CLIP, "")))
step.refuses("clipped to another length", "clipped by another norm, or to another number", _step(("1.0", "0.5")))
step.refuses(
    "clipped after the step", "right before it is clipped", _step((_CLIP + "\n" + _STEP, _STEP + "\n" + _CLIP))
)
step.refuses(
    "zero_grad before the step", "after the step, not before it", _step((_STEP + "\n" + _ZERO, _ZERO + "\n" + _STEP))
)
step.refuses("no backward", "no backward pass", _step(("    part.backward()\n", "")))
step.refuses("no step", "takes no step", _step((_STEP, "")))
step.refuses("targets are the inputs", "scaled otherwise", _step(("micro_batch[:, 1:]", "micro_batch[:, :-1]")))
step.refuses("the loss of the last", "is the mean", _step(("loss += part.detach()", "loss = part.detach()")))
step.refuses(
    "the whole batch at once",
    "in 1 pieces",
    """
    loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    """
    + "\n    ".join(["", _CLIP, _STEP, _ZERO]),
)

# 01.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "01.1",
    "Attention",
    "attention",
    minutes=6,
    hints=[
        "`q @ k.transpose(-2, -1)` has the score of each token (row) with each token (column). Divide it.",
        "Set the scores above the diagonal to minus infinity before the softmax: "
        "`scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)`.",
        "The softmax makes the shares of each row sum to 1: `dim=-1`. The shares times v are the answer.",
    ],
)
def attention_by_hand(attention):
    for batch in ([], [], [2]):
        heads, length, width = random.randint(2, 5), random.randint(4, 9), random.choice([3, 5, 7])
        q, k, v = torch.randn(3, *batch, heads, length, width).double()
        scores, past = q @ k.transpose(-2, -1) / width**0.5, torch.ones(length, length).tril().bool()
        masked = scores.masked_fill(~past, -torch.inf)
        causes = {
            "each token sees later ones as well: the mask is missing": scaled_dot_product_attention(q, k, v),
            "a token must see itself": scores.masked_fill(~past.tril(-1), -torch.inf).softmax(-1).nan_to_num() @ v,
            "each token sees itself and later ones: the mask is the wrong way round": scores.masked_fill(
                ~past.T, -torch.inf
            ).softmax(-1)
            @ v,
            "the mask comes after the softmax, so the shares of a row no longer sum to 1": (scores.softmax(-1) * past)
            @ v,
            "the scores are not divided": (masked * width**0.5).softmax(-1) @ v,
            "the scores are divided by the width: take its root": (masked / width**0.5).softmax(-1) @ v,
            "the width of all heads together is not the width of one": (masked / heads**0.5).softmax(-1) @ v,
            "the shares of a column sum to 1; those of a row should": masked.softmax(-2) @ v,
            "scores of 0 still get a share: a masked score must be minus infinity": (scores * past).softmax(-1) @ v,
        }
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
        same(attention(q, k, v), expected, "the result", causes=causes, rtol=1e-9)


_SCORES = "scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5\n"
_FUTURE = "future = torch.ones_like(scores).triu(1).bool()\n"
attention_by_hand.refuses("no mask", "the mask is missing", _SCORES + "return scores.softmax(-1) @ v")
attention_by_hand.refuses(
    "masked with zeros",
    "must be minus infinity",
    _SCORES + _FUTURE + "return scores.masked_fill(future, 0).softmax(-1) @ v",
)
attention_by_hand.refuses(
    "not divided",
    "not divided",
    "scores = q @ k.transpose(-2, -1)\n" + _FUTURE + "return scores.masked_fill(future, -torch.inf).softmax(-1) @ v",
)
attention_by_hand.refuses(
    "softmax over columns",
    "those of a row should",
    _SCORES + _FUTURE + "return scores.masked_fill(future, -torch.inf).softmax(-2) @ v",
)
attention_by_hand.refuses("hard-coded for a text of one token", "the result", "return v")


# 01.2 ---------------------------------------------------------------------------------------------------------------


def count(module: nn.Module, part: str = "") -> int:
    """The parameters of a module whose names contain `part`."""
    return sum(p.numel() for name, p in module.named_parameters() if part in name)


@exercise(
    "01.2",
    "To the last parameter",
    "gpt_parameters",
    minutes=8,
    hints=[
        "Write one line for the matrices of a layer, one for its biases, one for its norms. In units of width, a bias "
        "is as long as what comes out of its matrix: 3, 1, 4 and 1.",
        "Heads share out the width: twelve heads of 64 numbers have the matrices of one head of 768.",
        "Compare with the 124,439,808: what is missing, divided by 768, is a small number that tells what you forgot.",
    ],
)
def to_the_last_parameter(gpt_parameters):
    for head_width, most_layers in ((4, 3), (64, 24), (128, 96)):
        layers, heads = random.randint(2, most_layers), random.randint(3, 96)
        d, vocab, context = heads * head_width, random.randint(200, 130_000), random.randint(65, 8192)
        with torch.device("meta"):
            layer = nn.TransformerEncoderLayer(d, heads, 4 * d)
            tokens, places, norm = nn.Embedding(vocab, d), nn.Embedding(context, d), nn.LayerNorm(d)
        whole = layers * count(layer) + count(tokens) + count(places) + count(norm)
        norms, per_head = count(layer, "norm"), count(layer, "in_proj")
        biases = count(layer, "bias") - count(layer, "norm1.bias") - count(layer, "norm2.bias")
        causes = {
            "the head has been counted, but it shares the token embeddings": whole + count(tokens),
            "the embeddings of the places are missing": whole - count(places),
            "the last layer norm is missing": whole - count(norm),
            "the layer norms are missing": whole - layers * norms - count(norm),
            "the two layer norms of each layer are missing": whole - layers * norms,
            "the biases of the matrices are missing": whole - layers * biases,
            "biases and layer norms are missing": whole - layers * (biases + norms) - count(norm),
            "a layer norm has a shift as well as a scale": whole - layers * norms // 2 - count(norm) // 2,
            "heads share out the width, so their number does not change the count": whole
            + layers * (heads - 1) * per_head,
            "the embeddings are missing": whole - count(tokens) - count(places),
        }
        same(gpt_parameters(layers, d, heads, vocab, context), whole, "the count", causes=causes, rtol=1e-13)


to_the_last_parameter.refuses(
    "12 L d² and embeddings",
    "biases and layer norms are missing",
    "return 12 * layers * width**2 + (vocab + context) * width",
)
to_the_last_parameter.refuses(
    "a head of its own",
    "it shares the token embeddings",
    "return layers * (12 * width**2 + 13 * width) + (2 * vocab + context) * width + 2 * width",
)
to_the_last_parameter.refuses(
    "no last norm",
    "the last layer norm is missing",
    "return layers * (12 * width**2 + 13 * width) + (vocab + context) * width",
)
to_the_last_parameter.refuses(
    "queries, keys and values for each head",
    "heads share out the width",
    "return layers * ((9 + 3 * heads) * width**2 + (10 + 3 * heads) * width) + (vocab + context) * width + 2 * width",
)
to_the_last_parameter.refuses(
    "norms without a shift",
    "a shift as well as a scale",
    "return layers * (12 * width**2 + 11 * width) + (vocab + context) * width + width",
)
to_the_last_parameter.refuses("hard-coded for the shown GPT-2", "the count", "return 124_439_808")


# 01.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "01.3",
    "AdamW by hand",
    "adamw",
    minutes=10,
    hints=[
        "Write the lines in the order of the text: m, v, then both corrected, then the weight. Return m and v as they "
        "are before the correction.",
        "The decay acts on the old weight alone, never on the gradient. That is what the W stands for.",
        "The bracket is (root of the corrected v) + eps; `step` is the exponent of both betas.",
    ],
)
def adamw_by_hand(adamw):
    for size in (1.0, 0.05):
        weight, m, v = torch.randn(5, 3).double(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
        b1, b2, eps = random.uniform(0.75, 0.92), random.uniform(0.94, 0.99), 0.02 * size
        lr, decay = random.uniform(0.05, 0.2), random.uniform(0.3, 0.6)
        parameter = nn.Parameter(weight.clone())
        torch_adamw = torch.optim.AdamW([parameter], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, foreach=False)
        for step in range(1, 5):
            gradient = size * torch.randn(5, 3).double()
            parameter.grad = gradient.clone()
            torch_adamw.step()
            kept = torch_adamw.state[parameter]
            new, new_m, new_v = adamw(weight, gradient, m, v, step, lr, b1, b2, eps, decay)
            with_decay = gradient + decay * weight
            same(
                new_m,
                kept["exp_avg"],
                f"m after step {step}",
                causes={
                    "the decay has been added to the gradient; in AdamW it acts on the weight alone": b1 * m
                    + (1 - b1) * with_decay,
                    "the betas weigh the wrong part: most of the old average stays": (1 - b1) * m + b1 * gradient,
                    "the new gradient enters whole: is its share 1 - beta1 missing? Or is this the corrected m, "
                    "which is for this step's update only": b1 * m + gradient,
                    "this is the corrected m: the correction is for this step's update only": kept["exp_avg"]
                    / (1 - b1**step),
                },
                rtol=1e-9,
            )
            same(
                new_v,
                kept["exp_avg_sq"],
                f"v after step {step}",
                causes={
                    "the gradient must be squared": b2 * v + (1 - b2) * gradient,
                    "the betas weigh the wrong part: most of the old average stays": (1 - b2) * v + b2 * gradient**2,
                    "this is the corrected v: the correction is for this step's update only": kept["exp_avg_sq"]
                    / (1 - b2**step),
                },
                rtol=1e-9,
            )
            known = (weight, m, new_m.double(), new_v.double(), step, lr, b1, b2, eps, decay)
            same(new, parameter.detach(), f"the weight after step {step}", causes=mistaken(*known), rtol=1e-9)
            weight, m, v = new, new_m, new_v


def mistaken(weight, old_m, m, v, step, lr, b1, b2, eps, decay) -> dict[str, torch.Tensor]:
    """The weight after one step with one mistake each."""
    m_hat, v_hat, decayed = m / (1 - b1**step), v / (1 - b2**step), weight * (1 - lr * decay)
    update = lr * m_hat / (v_hat.sqrt() + eps)
    values = {
        "neither average is corrected: both began at 0": decayed - lr * m / (v.sqrt() + eps),
        "v is not corrected, and it began at 0 as well": decayed - lr * m_hat / (v.sqrt() + eps),
        "m is not corrected, and it began at 0 as well": decayed - lr * m / (v_hat.sqrt() + eps),
        "the weight does not decay": weight - update,
        "the decay is not multiplied by lr": weight * (1 - decay) - update,
        "the new weight has decayed; the old one should, before it moves": (weight - update) * (1 - lr * decay),
        "it moves uphill: mind the sign": decayed + update,
        "eps belongs outside the root": decayed - lr * m_hat / (v_hat + eps).sqrt(),
        "the root of v is missing": decayed - lr * m_hat / (v_hat + eps),
        "this moves by the old m, from before this step's gradient": decayed
        - lr * old_m / (1 - b1**step) / (v_hat.sqrt() + eps),
    }
    if step > 1:
        first = decayed - lr * m / (1 - b1) / ((v / (1 - b2)).sqrt() + eps)
        values["the correction is that of step 1: the betas have the step as an exponent"] = first
    return values


_AVERAGES = """
m = beta1 * m + (1 - beta1) * gradient
v = beta2 * v + (1 - beta2) * gradient**2
"""
adamw_by_hand.refuses(
    "no correction",
    "neither average is corrected",
    _AVERAGES + "return weight * (1 - lr * decay) - lr * m / (v.sqrt() + eps), m, v",
)
adamw_by_hand.refuses(
    "decay in the gradient, as in Adam",
    "acts on the weight alone",
    """
    gradient = gradient + decay * weight
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    return weight - lr * m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps), m, v
    """,
)
adamw_by_hand.refuses(
    "decay without lr",
    "not multiplied by lr",
    _AVERAGES
    + "return weight * (1 - decay) - lr * m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps), m, v",
)
adamw_by_hand.refuses(
    "eps under the root",
    "outside the root",
    _AVERAGES
    + "return weight * (1 - lr * decay) - lr * m / (1 - beta1**step) / (v / (1 - beta2**step) + eps).sqrt(), m, v",
)
adamw_by_hand.refuses(
    "hard-coded for the first step",
    "that of step 1",
    _AVERAGES + "return weight * (1 - lr * decay) - lr * m / (1 - beta1) / ((v / (1 - beta2)).sqrt() + eps), m, v",
)


# 01.4 ---------------------------------------------------------------------------------------------------------------


def operations(work) -> int:
    """The operations of the products in a forward pass; the backward pass has twice as many of either kind."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def of_linear(*shapes: tuple[int, int]) -> float:
    """Counted by torch: the operations for a token of layers with weights, which are (in, out)."""
    return operations(lambda: [nn.Linear(n, m)(torch.empty(16, n)) for n, m in shapes]) / 16


def of_attention(heads: int, head_width: int) -> float:
    """Counted by torch: the operations of the products without weights, for a token and a place."""

    def products() -> torch.Tensor:
        q, k, v = torch.empty(3, heads, 16, head_width)
        return (q @ k.transpose(1, 2)) @ v

    return operations(products) / 16**2


@exercise(
    "01.4",
    "Where attention takes over",
    "takes_over",
    minutes=8,
    core=False,
    hints=[
        "A product of a row of d numbers with a matrix of n weights costs 2 n operations. Write both sides for one "
        "token, all layers.",
        "One query with one key costs 2 d operations, all heads together; one share with one value as many. Times "
        "what, for a token?",
        "The attention products are in each of the layers, and the head is there once. Solve for T.",
    ],
)
def attention_takes_over(takes_over):
    for _ in range(4):
        layers, heads, head_width = random.randint(3, 60), random.randint(3, 40), random.choice([32, 64, 128])
        d, vocab = heads * head_width, random.randint(1000, 130_000)
        projections, mlp, head = of_linear((d, 3 * d), (d, d)), of_linear((d, 4 * d), (4 * d, d)), of_linear((d, vocab))
        place = layers * of_attention(heads, head_width)
        matrices = layers * (projections + mlp)
        expected = (matrices + head) / place
        causes = {
            "the head is missing: it is a product, too": matrices / place,
            "the head is there once, and the attention products in each layer": (matrices + layers * head) / place,
            "the MLP is missing": (layers * projections + head) / place,
            "the projections of attention are missing: they have weights": (layers * mlp + head) / place,
            "an embedding is looked up, which costs no product": (matrices + 2 * head) / place,
        }
        scale = {
            2: "attention has two products, and both over the whole square",
            0.5: "one query with one key costs 2 d operations, all heads together",
            heads: "the heads share out the width: all together have d numbers",
            1 / heads: "the heads share out the width: all together have d numbers",
            1.5: "the backward pass doubles for both kinds",
        }
        same(takes_over(layers, d, vocab), expected, "the length", scale=scale, causes=causes, rtol=1e-9)


attention_takes_over.refuses("six widths, no head", "the head is missing", "return 6 * width")
attention_takes_over.refuses(
    "one product of attention",
    "attention has two products",
    "return (12 * layers * width**2 + width * vocab) / (layers * width)",
)
attention_takes_over.refuses(
    "a head in each layer", "the head is there once", "return (12 * width**2 + width * vocab) / (2 * width)"
)
attention_takes_over.refuses(
    "embeddings as products",
    "costs no product",
    "return (12 * layers * width**2 + 2 * width * vocab) / (2 * layers * width)",
)
attention_takes_over.refuses(
    "projections counted as attention's own",
    "they have weights",
    "return (8 * layers * width**2 + width * vocab) / (2 * layers * width)",
)
attention_takes_over.refuses("hard-coded for the shown GPT-2", "the length", "return 6702.0416667")
