{% extends "parts/script.sh" %}
{% set distribution = "block" %}
{% block opening %}
#: Slurm runs this on the job's first node. Ranks of a node hold a copy of the model in stages; nodes hold copies.
{% endblock %}
{% block placement %}
#: Stages talk most, so that they belong together: in blocks, rank // {{ spec.model_stages }} is the copy and rank % {{ spec.model_stages }} the stage.
{% endblock %}
