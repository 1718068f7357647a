{% extends "parts/script.sh" %}
{% block opening %}
#: Slurm runs this on the job's first node. Ranks on cores, for any strategy.
{% endblock %}
