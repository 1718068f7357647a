#: Run with bash on a login node. It asks for nodes and begins again on them.
#!/bin/bash
if [ -z "${SLURM_JOB_ID:-}" ]; then
    ask=(salloc
{% filter adapted|as_arguments %}
{% include "parts/resources.sh" %}
{% endfilter %}
    )
#: salloc waits for the nodes, runs this file again, and gives them back at its end.
    exec "${ask[@]}" bash "$0"
fi

{% include "parts/environment.sh" %}

{% if spec.job or spec.command %}
{% include "parts/folder.sh" %}

{% include "parts/launcher.sh" %}

{% include "parts/signals.sh" %}
{% include "parts/doctor.sh" %}

{% include "parts/payload.sh" %}
{% include "parts/run.sh" %}
{% else %}
#: A shell with a terminal (--pty) on the first node. --overlap leaves the cores to what it starts.
exec srun --nodes=1 --ntasks=1 --overlap --pty bash
{% endif %}
