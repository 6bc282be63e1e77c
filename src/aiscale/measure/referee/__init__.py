"""The referee: a training script on N ranks against itself on one: where do the two part?

    aiscale verify train_ddp.py --nproc 4 --steps 3 -- --save '{TMP}/checkpoint'

`runs` starts the script; in each rank `probe` watches it and writes a trace. `compare` reads the
traces and needs no process group: it puts shards together, aligns samples, and walks through each
step in order. `verdict` says it."""
