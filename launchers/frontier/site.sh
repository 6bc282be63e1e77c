# shellcheck shell=bash disable=SC2016  # what each rank's shell expands
# Frontier (OLCF): modules, environment, network and `launch`, for all launchers of this folder. A
# new module, or another variable, is a change of this file alone. Why each line: README.md beside
# it.
step=() container=()  # more options of srun; the words that start a container
module reset
module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0
module load rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH"
export PATH="${ENVIRONMENT%.tar.gz}/bin:$PATH" PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
ls "${ENVIRONMENT%.tar.gz}/bin/python" > /dev/null
# The trainings of a chain (aiscale submit --chain, or CHAIN=1 sbatch --requeue) end as it says.
# shellcheck source-path=SCRIPTDIR source=chain.sh
if [ -n "${RUNS:+${AISCALE_CHAIN:-${CHAIN:-}}}" ]; then source "${BASH_SOURCE[0]%/*}/chain.sh"; fi
# A packed environment goes to each node's own disk.
# shellcheck source-path=SCRIPTDIR source=unpack.sh
if [[ "$ENVIRONMENT" = *.tar.gz ]]; then source "${BASH_SOURCE[0]%/*}/unpack.sh"; fi
if [ -n "${AISCALE_KERNEL:-}" ]; then return; fi  # a kernel of Jupyter needs no more

export NCCL_NET_PLUGIN=librccl-net.so NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
caches="$(mktemp -d)"
export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"
export TRITON_CACHE_DIR="$caches/triton" TORCH_EXTENSIONS_DIR="$caches/torch"
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor"

launch() {  # launch WORDS: one rank for each GPU, with the variables that torchrun would have set
  MASTER_ADDR="$(hostname -i)"
  export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) OMP_NUM_THREADS=7
  if [ "$SLURM_NNODES" -gt 1 ]; then export NCCL_NET=OFI; else export NCCL_NET=Socket; fi
  rank='export RANK="$SLURM_PROCID" LOCAL_RANK="0" WORLD_SIZE="$SLURM_NTASKS"'
  srun --label --kill-on-bad-exit=1 --nodes="$SLURM_NNODES" \
    --ntasks="$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))" \
    --ntasks-per-node="$SLURM_NTASKS_PER_NODE" \
    --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest \
    "${step[@]}" bash -c "$rank"'; exec "$@"' rank "${container[@]}" "$@"
}
