{% extends "parts/script.sh" %}
{% set distribution = "cyclic" if spec.servers_on == "one_per_node" else "block" %}
{% block opening %}
#: Slurm runs this on the job's first node. Ranks 0 to {{ spec.servers - 1 }} serve; the others work.
{% endblock %}
{% block placement %}
#: Servers are the first ranks: in blocks they are on the first node, dealt out there is one on each node.
{% endblock %}
