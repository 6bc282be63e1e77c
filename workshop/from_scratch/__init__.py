"""A GPT from nothing but NumPy: on its own autograd, then on MPI's ranks, then on kernels of its own for a GPU.

Read in this order, an evening's walk:
tensor.py      an array that remembers how it was made; backward() plays the tape
cpu.py         what the operations compute, forward and backward, in NumPy
layers.py      linear, embedding, layer norm, attention, MLP, block
gpt.py         the model
adam.py        the optimizer
corpus.py, tokenizer.py, dataloader.py     words in, windows of 256 out
train.py, checkpoint.py, inference.py      stage 0: one process
mpi.py, pitfalls.py                        stage 1: each rank its share of a batch
gpu.py, cuda_kernels.py                    stage 2, and with mpiexec stage 3
nccl_sums.py                               stage 3 with NCCL
"""
