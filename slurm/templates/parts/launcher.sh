{% set distribution = distribution|default("block") %}
{% include "parts/hosts.sh" %}

{% if site.launcher == "srun" %}
#: How ranks are started: srun, one task for each.
launch=(srun
{% if site.mpi %}
#: The PMI that this MPI speaks. With another one each rank would be alone in a world of size 1, without an error.
    --mpi={{ site.mpi }}
{% endif %}
{% include "parts/layout.sh" %}
    --distribution={{ distribution }}
#: Each rank keeps to its own cores.
    --cpu-bind={{ site.cpu_bind }}
{% if spec.gpus %}
#: Which of the node's GPUs a rank sees. With none it sees all and takes the one of its local rank, and NCCL can copy
#: from GPU to GPU; binding hides the others.
    --gpu-bind={{ site.gpu_bind }}
{% endif %}
#: One dead rank ends all, where they would wait for it to the time limit.
    --kill-on-bad-exit=1
#: After a rank has ended the others have so many seconds to do so.
    --wait=60
#: Each line of the log begins with its rank.
    --label
#: Lines reach the log at once.
    --unbuffered
{% elif site.launcher == "mpirun" %}
#: How ranks are started: Open MPI's mpirun, which finds Slurm's nodes and starts a daemon on each through srun.
launch=(mpirun
{% set pe = ":PE=" ~ spec.cpus_per_rank if site.cpu_bind != "none" else "" %}
{% include "parts/layout.sh" %}
{% if distribution == "cyclic" %}
    --map-by {{ "node" ~ pe }} --rank-by node
{% else %}
    --map-by {{ "ppr:" ~ spec.ranks_per_node ~ ":node" ~ pe }}
{% endif %}
#: Each rank keeps to its own cores.
    --bind-to {{ {"cores": "core", "threads": "hwthread", "none": "none"}[site.cpu_bind] }}
#: Each line of the log begins with its rank.
    --output tag
{% if spec.shrink %}
#: Ranks go on without one that dies.
    --with-ft ulfm
{% endif %}
{% else %}
#: How ranks are started: MPICH's mpiexec, which finds Slurm's nodes and starts a proxy on each through srun.
launch=(mpiexec
{% if site.cpu_bind != "none" %}
#: Each rank keeps to its own cores.
    -bind-to {{ {"cores": "core", "threads": "hwthread"}[site.cpu_bind] ~ ":" ~ spec.cpus_per_rank }}
{% endif %}
#: Each line of the log begins with its rank.
    -prepend-rank
{% endif %}
{% for option in site.launcher_options %}
#: From the site's profile.
    {{ option }}
{% endfor %}
)

#: Where ranks go: {{ spec.ranks_per_node }} on each of `hosts`, in the launcher's words.
place() {
    local IFS=,
    ranks=$((${#hosts[@]} * {{ spec.ranks_per_node }}))
{% if site.launcher == "mpiexec" %}
{% include "parts/layout.sh" %}
{% endif %}
{% if site.launcher == "srun" %}
    where=(--nodes="${#hosts[@]}" --ntasks="$ranks" --ntasks-per-node={{ spec.ranks_per_node }}
        --nodelist="${hosts[*]}")
{% elif site.launcher == "mpirun" %}
    where=(-n "$ranks" --host "${hosts[*]/%/:{{ spec.ranks_per_node }}}")
{% else %}
    where=(-n "$ranks" -ppn {{ 1 if distribution == "cyclic" else spec.ranks_per_node }} -hosts "${hosts[*]}")
{% endif %}
}
place
