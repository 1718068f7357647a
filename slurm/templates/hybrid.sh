{% extends "parts/script.sh" %}
{% set distribution = "block" %}
{% block opening %}
#: Slurm runs this on the job's first node. Ranks of a node hold one copy of the model in parts; nodes hold copies.
{% endblock %}
{% block placement %}
#: Stages talk most, so that they belong together: in blocks, rank // {{ spec.ranks_per_node }} is the copy and rank % {{ spec.ranks_per_node }} the stage.
{% endblock %}
