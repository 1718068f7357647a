{% if distribution == "cyclic" %}
#: Ranks are dealt out: 0 to the first node, 1 to the second, and so on.
{% else %}
#: Ranks 0, 1, ... fill the first node, then the second.
{% endif %}
{% if spec.shape == "parameter_server" and distribution == "cyclic" %}
#: So the servers, which are the first ranks, have a node each as long as there are nodes.
{% elif spec.shape == "parameter_server" %}
#: So the servers, which are the first ranks, are on the first node.
{% elif spec.shape == "hybrid" %}
#: So the stages of a copy of the model are ranks in a row, of one node: they talk most.
{% endif %}
