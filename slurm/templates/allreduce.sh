{% extends "parts/script.sh" %}
{% block opening %}
#: Slurm runs this on the job's first node. A rank for each GPU; gradients are summed over all of them.
{% endblock %}
{% block variables %}
{% if spec.gpus %}
#: What NCCL warns of is in the log.
export NCCL_DEBUG=WARN
{% endif %}
{% endblock %}
