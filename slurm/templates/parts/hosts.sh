#: The job's hosts in Slurm's order: rank 0 runs on the first.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
#: Without hosts everything would run on this one.
((${#hosts[@]})) || { echo >&2 "scontrol must name the hosts of $SLURM_JOB_NODELIST; got none."; exit 1; }
