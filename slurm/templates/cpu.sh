#: Slurm runs this on the job's first node.
#!/bin/bash
{% filter adapted %}
{% include "parts/resources.sh" %}
{% include "parts/batch.sh" %}
{% endfilter %}

{% include "parts/environment.sh" %}

{% include "parts/folder.sh" %}

{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% include "parts/run.sh" %}
