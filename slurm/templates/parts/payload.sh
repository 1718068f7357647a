{% if spec.command %}
#: What every rank runs: your own command.
payload=({{ (site.container + spec.command)|words }})
{% else %}
#: What every rank runs. --resume goes on from the newest checkpoint, and starts anew where there is none.
payload=({{ (site.container + ["hpcdist", "train"])|words }} {{ spec.job|file }} --output "$folder" --resume
{% if spec.config %}
#: The run's settings.
    --config {{ spec.config|file }}
{% endif %}
{% if site.cpu_bind == "none" %}
#: The site binds no ranks, and neither does the library.
    --no-bind
{% endif %}
{% if site.interface %}
#: One-sided strategies take the fast network, too.
    --set {{ "internode=auto:" ~ site.interface }}
{% endif %}
{% for setting in spec.run_settings %}
#: A setting of the run; of two of the same key the last one holds.
    --set {{ setting }}
{% endfor %}
)
{% endif %}
