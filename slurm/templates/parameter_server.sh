#: Slurm runs this on the job's first node. Ranks 0 to {{ spec.servers - 1 }} serve; the others work.
#!/bin/bash
{% filter adapted %}
{% include "parts/resources.sh" %}
{% include "parts/batch.sh" %}
{% endfilter %}

{% include "parts/environment.sh" %}

{% include "parts/folder.sh" %}

{% set distribution = "cyclic" if spec.servers_on == "one_per_node" else "block" %}
{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% include "parts/run.sh" %}
