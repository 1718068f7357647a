#: The job's name in squeue, and the beginning of its log's.
#SBATCH --job-name={{ spec.name|directive }}
{% if site.partition %}
#: The group of nodes to run on.
#SBATCH --partition={{ site.partition|directive }}
{% endif %}
{% if site.account %}
#: Who is charged.
#SBATCH --account={{ site.account|directive }}
{% endif %}
{% if site.qos %}
#: Quality of service: priority and limits.
#SBATCH --qos={{ site.qos|directive }}
{% endif %}
{% if site.constraint %}
#: Only nodes with these features.
#SBATCH --constraint={{ site.constraint|directive }}
{% endif %}
{% if site.reservation %}
#: Nodes that are reserved.
#SBATCH --reservation={{ site.reservation|directive }}
{% endif %}
{% if spec.spare_nodes %}
#: Nodes that are needed, and spare ones that stand in for those that the doctor finds bad.
{% else %}
#: Nodes.
{% endif %}
#SBATCH --nodes={{ spec.nodes + spec.spare_nodes }}
#: Always said: by --ntasks alone Slurm packs the first nodes full, such as 4, 2, 1 and 1 ranks on four.
#SBATCH --ntasks-per-node={{ spec.ranks_per_node }}
#: Cores of each rank.
#SBATCH --cpus-per-task={{ spec.cpus_per_rank }}
{% if spec.gpus and site.gpus == "per_node" %}
#: GPUs are asked for by node, so that ranks of a node see each other's: NCCL and CUDA IPC copy directly between them.
#: --gpus-per-task would hide all but its own from each rank.
#SBATCH --gpus-per-node={{ site.gpus_named(spec.gpus * spec.ranks_per_node)|directive }}
{% elif spec.gpus and site.gpus == "per_task" %}
#: GPUs are asked for by rank. This alone would hide all but its own from each, so that NCCL and CUDA IPC could not copy
#: directly: --gpu-bind says below what ranks see.
#SBATCH --gpus-per-task={{ site.gpus_named(spec.gpus)|directive }}
{% elif spec.gpus %}
#: GPUs of each node, as Slurm before 19.05 and some sites still want them asked for.
#SBATCH --gres={{ ("gpu:" ~ site.gpus_named(spec.gpus * spec.ranks_per_node))|directive }}
{% endif %}
{% if spec.mem_gb %}
#: Memory of each node.
#SBATCH --mem={{ spec.mem_gb }}G
{% endif %}
#: Time limit in minutes. A shorter one starts sooner, and a requeued job has all of it again.
#SBATCH --time={{ spec.time_min }}
