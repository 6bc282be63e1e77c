# shellcheck shell=bash disable=SC2016  # what each rank's shell expands
# Perlmutter (NERSC): modules, environment, network and `launch`, for all launchers of this folder.
# A new module, or another variable, is a change of this file alone. Why each line: README.md beside
# it.
step=() container=()  # more options of srun; the words that start a container
module reset
if [ "$ENVIRONMENT" = container ]; then  # see the README
  container=(shifter --env=PYTHONUSERBASE="$SLURM_SUBMIT_DIR/user")
else
  module load pytorch/2.13.0
  export PATH="$ENVIRONMENT/bin:$PATH" PYTHONNOUSERSITE=1
  ls "$ENVIRONMENT/bin/python" > /dev/null
fi
export PYTHONUNBUFFERED=1 MPICH_GPU_SUPPORT_ENABLED=0
# The trainings of a chain (aiscale submit --chain, or CHAIN=1 sbatch --requeue) end as it says.
# shellcheck source-path=SCRIPTDIR source=chain.sh
if [ -n "${RUNS:+${AISCALE_CHAIN:-${CHAIN:-}}}" ]; then source "${BASH_SOURCE[0]%/*}/chain.sh"; fi
if [ -n "${AISCALE_KERNEL:-}" ]; then return; fi  # a kernel of Jupyter needs no more

export FI_MR_CACHE_MONITOR=userfaultfd HDF5_USE_FILE_LOCKING=FALSE
caches="$(mktemp -d)"
export TRITON_CACHE_DIR="$caches/triton" TORCH_EXTENSIONS_DIR="$caches/torch"
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor"

launch() {  # launch WORDS: one rank for each GPU, with the variables that torchrun would have set
  read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) OMP_NUM_THREADS=16
  if [ "$SLURM_NNODES" -gt 1 ]; then export NCCL_NET="${NCCL_NET:-AWS Libfabric}"; fi
  rank='export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"'
  # Behind srun, which sets CUDA_VISIBLE_DEVICES itself; a job on a part of a node keeps srun's.
  rank+='; if [ "$SLURM_GPUS_ON_NODE" = 4 ]; then export CUDA_VISIBLE_DEVICES=3,2,1,0; fi'
  srun --label --kill-on-bad-exit=1 --nodes="$SLURM_NNODES" \
    --ntasks="$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))" \
    --ntasks-per-node="$SLURM_NTASKS_PER_NODE" \
    --cpus-per-task=32 --gpus-per-node="$SLURM_GPUS_PER_NODE" \
    "${step[@]}" bash -c "$rank"'; exec "$@"' rank "${container[@]}" "$@"
}
