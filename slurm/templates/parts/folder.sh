{% if spec.folders %}
#: The runs' folders, by the array's tasks. A run that is submitted again has the same one.
folders=(
{% for folder in spec.folders %}
    {{ folder }}
{% endfor %}
)
folder={{ spec.output|file }}/${folders[SLURM_ARRAY_TASK_ID]}
{% elif spec.shape == "study" %}
#: The run's folder is the job's own, and the same after it has been requeued.
folder={{ spec.output|file }}/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
{% else %}
#: The run's folder is the job's own, and the same after it has been requeued.
folder={{ spec.output|file }}/$SLURM_JOB_ID
{% endif %}
#: For commands of your own, which find it in this variable.
export HPCDIST_RUN="$folder"
mkdir -p "$folder" || exit
