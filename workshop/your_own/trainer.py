"""A language model of Hugging Face's transformers, trained by their Trainer: flags say how it is spread.

    torchrun --nproc-per-node=2 trainer.py --output_dir out --max_steps 10             # DDP
    torchrun --nproc-per-node=2 trainer.py --output_dir out --max_steps 10 --fsdp
    torchrun --nproc-per-node=2 trainer.py --output_dir out --max_steps 10 --deepspeed ds_config.json

On CPUs add --use_cpu --ddp_backend gloo, or each process trains alone.
"""

import time

import torch
from model import TEXT, read_windows
from shared_folder import check_shared
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    check_shared(args.output_dir)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    windows = [{"input_ids": window[:-1], "labels": window[:-1]} for window in read_windows(TEXT)]
    Trainer(model=model, args=args, train_dataset=windows).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.5)  # gloo's thread lets go of the last message; if Python ends in that moment, it aborts
