{% block opening %}
#: Slurm runs this on the job's first node.
{% endblock %}
#!/bin/bash
{% filter adapted %}
{% include "parts/resources.sh" %}
{% include "parts/batch.sh" %}
{% block directives %}
{% endblock %}
{% endfilter %}

{% include "parts/environment.sh" %}
{% block variables %}
{% endblock %}

{% include "parts/folder.sh" %}

{% block placement %}
{% endblock %}
{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% block payload %}
{% endblock %}
{% include "parts/run.sh" %}
