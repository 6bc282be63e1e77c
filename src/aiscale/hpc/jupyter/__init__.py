"""Jupyter kernels that load a site's modules and activate an environment before Python starts: see kernel.py."""

from aiscale.hpc.jupyter.kernel import KernelError, Spec, install, kernels_dir, start_script

__all__ = ["KernelError", "Spec", "install", "kernels_dir", "start_script"]
