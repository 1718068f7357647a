#: The log: %x is the job's name, %j its number, %A and %a an array's and the task's. Slurm does not make its folder.
#SBATCH --output={{ spec.log|directive }}
#: A requeued job goes on in the same log, where Slurm would begin it anew.
#SBATCH --open-mode=append
{% if spec.requeue %}
#: Slurm may start the job again, after preemption or when a node has died; it goes on from its newest checkpoint.
#SBATCH --requeue
{% else %}
#: Slurm must not start the job again.
#SBATCH --no-requeue
{% endif %}
#: So many seconds before the time limit USR1 comes to this script (B:), which passes it on. Ranks then save and leave.
#SBATCH --signal=B:USR1@{{ spec.warn_s }}
