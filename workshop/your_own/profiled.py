"""Where a step of train_ddp.py spends its time: a trace of each rank, for https://ui.perfetto.dev or chrome://tracing.

torchrun --nproc-per-node=2 profiled.py --traces traces
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, TEXT, loss_of, read_windows
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule
from train import device


def main(args):
    dist.init_process_group()
    model = DistributedDataParallel(GPT(width=256).to(device), bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = read_windows(TEXT)[:16].to(device)
    if device.type == "cuda":  # every allocation with its stack, for https://docs.pytorch.org/memory_viz
        torch.cuda.memory._record_memory_history()

    def write(profiler):
        Path(args.traces).mkdir(exist_ok=True)
        profiler.export_chrome_trace(f"{args.traces}/rank{dist.get_rank()}.json")

    # One step to settle, one to warm the profiler up, one to record. A long trace is one that nobody reads.
    with profile(schedule=schedule(wait=1, warmup=1, active=1), on_trace_ready=write) as profiler:
        for _ in range(3):
            with record_function("forward"):
                loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    if dist.get_rank() == 0:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=30))
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(f"{args.traces}/memory{dist.get_rank()}.pickle")
    del model
    gc.collect()  # DDP ends before the group that it holds: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="traces", help="the folder to write to")
    main(parser.parse_args())
