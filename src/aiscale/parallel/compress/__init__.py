"""How DDP sends gradients: dense (fp32 or bf16, overlapped or not) or compressed, one file per method; see `base`."""

from aiscale.parallel.compress.base import Bucket, Compressor, GradientError, build_compressor
