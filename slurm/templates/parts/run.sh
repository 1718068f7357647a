
#: A node that dies takes the run with it before Slurm knows why; a task on each host shows whether one is missing.
all_there() {
    timeout 60 srun --overlap --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 \
        --nodelist="$(IFS=, && echo "${hosts[*]}")" true
}

#: Each rank first says which cores it may use, which is what binding came to; then the shell becomes the payload, which
#: USR1 does not kill before it listens.
task=(bash -c 'trap "" USR1; echo "$(uname -n) $(grep Cpus_allowed_list /proc/self/status)"; exec "$@"' task)
run "${launch[@]}" "${where[@]}" "${task[@]}" "${payload[@]}"
status=$?
{% if site.launcher == "mpirun" %}
#: Open MPI's mpirun says 0 when a node has died. Then the run is not over, unless it has written its summary.
((status)) || [ -e "$folder/summary.json" ] || all_there || status=1
{% endif %}
{% if spec.requeue and spec.shape != "interactive" %}
#: 75: the ranks have saved and left before their work was done. The same job goes on when its turn comes.
back=$((status == 75))
#: So does one that was not to blame; but not for ever, should a failure only look like that.
if ((status && !back && ${SLURM_RESTART_COUNT:-0} < 20)); then
    all_there || back=1
#: Preemption may end mpirun's daemons first, and with them the ranks, before these have left.
    [[ $(scontrol show job "$SLURM_JOB_ID") != *PreemptTime=[0-9]* ]] || back=1
fi
#: Unless someone has cancelled the job.
if ((back)) && [ -z "$ended" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
{% endif %}
#: The job's status is the run's.
exit "$status"
