"""Jupyter kernels that load a site's modules and activate an environment before Python starts.

    aiscale kernel install                        # on a login node, from the environment that it is to be
    aiscale kernel list
    install(Spec("class", "Class", environment, site("frontier")), kernels_dir(prefix="/shared/jupyter"))

kernel.py     what is written, where, and how it is found again
command.py    the command line
templates/    start.sh.j2, the script by which Jupyter starts the kernel
"""

from aiscale.hpc.jupyter.kernel import KernelError, Spec, install, installed, kernels_dir, uninstall

__all__ = ["KernelError", "Spec", "install", "installed", "kernels_dir", "uninstall"]
