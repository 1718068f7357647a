#: Slurm runs this on the job's first node. Ranks of a node hold one copy of the model in parts; nodes hold copies.
#!/bin/bash
{% filter adapted %}
{% include "parts/resources.sh" %}
{% include "parts/batch.sh" %}
{% endfilter %}

{% include "parts/environment.sh" %}

{% include "parts/folder.sh" %}

{% set distribution = "block" %}
{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% include "parts/run.sh" %}
