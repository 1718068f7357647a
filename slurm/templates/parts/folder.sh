#: The run's folder is the job's own, and the same after it has been requeued.
{% if spec.shape == "study" %}
folder={{ spec.output|file }}/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
{% else %}
folder={{ spec.output|file }}/$SLURM_JOB_ID
{% endif %}
#: For commands of your own, which find it in this variable.
export HPCDIST_RUN="$folder"
mkdir -p "$folder" || exit
