"""GPT-2 XL from pretrained weights, by FSDP through Hugging Face's Trainer, on a launcher's ranks.

    hf download openai-community/gpt2-xl --local-dir models/gpt2-xl \\
        --include "*.json" --include "*.safetensors"
    sbatch launchers/SITE/hf_trainer.sbatch launchers/hf_trainer.py \\
        --model models/gpt2-xl --text my_texts

Options of transformers' TrainingArguments follow: --max_steps 200 --learning_rate 1e-5. A trial on
CPUs with two ranks:

    torchrun --nproc-per-node=2 launchers/hf_trainer.py --model ... \\
        --use_cpu --ddp_backend gloo --bf16 false

There the Trainer takes DDP instead, since accelerate has FSDP on GPUs only; the last line says
which it was, and where the trained model and its tokenizer lie: in --output_dir, runs/hf_trainer by
default.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

DEFAULTS = "--output_dir runs/hf_trainer --max_steps 50 --per_device_train_batch_size 6 --bf16 true"
DEFAULTS += " --logging_steps 1 --save_strategy no --report_to none --fsdp --fsdp_config"
#: one unit for each block; activations are computed again in the backward pass
FSDP = '{"activation_checkpointing": true}'


@dataclass
class Ours:
    model: str = "models/gpt2-xl"  #: a folder with config.json, weights and tokenizer
    text: str = "my_texts"  #: a file, or a folder of .txt files
    window: int = 1024  #: tokens of a sequence


def windows_of(ours: Ours, tokenizer) -> list[dict[str, torch.Tensor]]:
    path = Path(ours.text)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    tokens = [
        token
        for file in files
        for token in tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    ]
    rows = torch.tensor(tokens).unfold(0, ours.window, ours.window)
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    words = [*DEFAULTS.split(), FSDP, *sys.argv[1:]]
    ours, args = HfArgumentParser([Ours, TrainingArguments]).parse_args_into_dataclasses(words)
    tokenizer = AutoTokenizer.from_pretrained(ours.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(ours.model, local_files_only=True)
    trainer = Trainer(model=model, args=args, train_dataset=windows_of(ours, tokenizer))
    trainer.train()
    if trainer.is_fsdp_enabled:  # by default it saves slices, and save_model would write no weights
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()  # all ranks give their slices, rank 0 writes
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(args.output_dir)
        folder = Path(args.output_dir).resolve()
        print(f"trained as {type(trainer.model_wrapped).__name__}, saved in {folder}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
