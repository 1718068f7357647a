{% extends "parts/script.sh" %}
{% block opening %}
#: Slurm runs this on the first node of each of the array's jobs.
{% endblock %}
{% block directives %}
#: A job for each of the cases below, and how many of them may run at a time.
#SBATCH --array=0-{{ spec.cases|length - 1 }}{% if spec.at_once %}%{{ spec.at_once }}{% endif %}

{% endblock %}
{% block payload %}
#: This job's case.
case $SLURM_ARRAY_TASK_ID in
{% for case in spec.cases %}
{{ loop.index0 }}) payload+=({{ case|settings }}) ;;
{% endfor %}
*) echo >&2 "the array's tasks must be 0 to {{ spec.cases|length - 1 }}; got $SLURM_ARRAY_TASK_ID."; exit 1 ;;
esac
{% endblock %}
