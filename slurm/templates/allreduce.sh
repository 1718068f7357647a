#: Slurm runs this on the job's first node. A rank for each GPU; gradients are summed over all of them.
#!/bin/bash
{% filter adapted %}
{% include "parts/resources.sh" %}
{% include "parts/batch.sh" %}
{% endfilter %}

{% include "parts/environment.sh" %}
{% if spec.gpus %}
#: What NCCL warns of is in the log.
export NCCL_DEBUG=WARN
{% endif %}

{% include "parts/folder.sh" %}

{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% include "parts/run.sh" %}
