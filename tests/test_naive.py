"""The form of each strategy that a lesson writes by hand gives the gradients or weights of one process."""

from ranks import run_ranks

CODE = """
from torch.nn.functional import gelu
from aiscale.config import ModelConfig
from aiscale.model import GPT
from aiscale.parallel.ddp import average_naively
from aiscale.parallel.fsdp import NaiveShardedLinear
from aiscale.parallel.megatron.naive import Enter, Leave
from aiscale.parallel.parts import Part
from aiscale.parallel.pipeline import naive_gpipe
from aiscale.parallel.zero import NaiveZeRO1

rank, n = world.rank, world.size
tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
def gpt():
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, max_seq_len=16)).double()
def backward(model, sequences):
    model.zero_grad()
    model(sequences[:, :-1], sequences[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters()}
def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
alone, mine = gpt(), tokens.chunk(n)[rank]
whole = backward(alone, tokens)

model = gpt()
backward(model, mine)
average_naively(model)
same({name: p.grad for name, p in model.named_parameters()}, whole)

optimizer, model = torch.optim.AdamW(alone.parameters(), lr=1e-3), gpt()
naive = NaiveZeRO1(model, lr=1e-3)
for _ in range(3):
    backward(alone, tokens)
    optimizer.step()
    backward(model, mine)
    naive.step()
same(list(model.parameters()), list(alone.parameters()))

x, A, B = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
(x @ A.T).square().mean().backward()
rows = A.detach().chunk(n)[rank].clone().requires_grad_()
NaiveShardedLinear.apply(x.detach().chunk(n)[rank], rows).square().mean().backward()
same(rows.grad, A.grad.chunk(n)[rank])

x.grad = A.grad = None
(gelu(x @ A) @ B).square().sum().backward()
leaves = [t.detach().clone().requires_grad_() for t in (x, A.chunk(n, 1)[rank], B.chunk(n, 0)[rank])]
Leave.apply(gelu(Enter.apply(leaves[0]) @ leaves[1]) @ leaves[2]).square().sum().backward()
same([leaf.grad for leaf in leaves], [x.grad, A.grad.chunk(n, 1)[rank], B.grad.chunk(n, 0)[rank]])

part = Part(gpt(), [rank], None)
naive_gpipe(part, [(row[None, :-1], row[None, 1:]) for row in tokens])
block = f"blocks.{rank}."
same({k: p.grad for k, p in part.named_parameters() if k.startswith(block)},
     {k: gradient for k, gradient in whole.items() if k.startswith(block)})
"""


def test_the_naive_form_of_every_strategy_equals_one_process(tmp_path):
    done = run_ranks(CODE, 2, tmp_path)
    assert done.returncode == 0, done.stderr
