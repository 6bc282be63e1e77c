"""The Trainer with a loss of one's own, on texts of unequal length. Arguments: the Trainer's."""

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = self.model(input_ids=inputs["input_ids"]).logits
        targets = inputs["labels"][:, 1:].flatten()
        total = cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        return total * self.accelerator.num_processes / num_items_in_batch


(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, **off)
model = GPT2LMHeadModel(config)
generator = torch.Generator().manual_seed(1)
data = []
for _ in range(96):
    text = torch.randint(64, (16,), generator=generator)
    length = int(torch.randint(4, 17, (1,), generator=generator))
    data.append({"input_ids": text, "labels": torch.where(torch.arange(16) < length, text, -100)})
MyTrainer(model=model, args=args, train_dataset=data).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
