"""How DDP sends gradients: dense (fp32 or bf16, overlapped or not) or compressed, one file per method.

compressor = build_compressor(run, world, model, optimizer)
compressor.register(ddp)        # before the first backward pass
... backward ...
compressor.after_backward()     # before clipping
... optimizer.step() ...
compressor.after_update()
"""

from aiscale.parallel.compress.base import Bucket, Compressor, GradientError, build_compressor
