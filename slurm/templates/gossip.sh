{% extends "parts/script.sh" %}
{% block opening %}
#: Slurm runs this on the job's first node. Ranks average with peers that they draw, and need no rank in particular.
{% endblock %}
