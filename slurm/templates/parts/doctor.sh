{% if spec.doctor %}

#: The nodes are examined before the run: does MPI see all ranks, is a link slow, a GPU taken, the disk full? An error
#: ends the job here, within half a minute.
examine() {
    local doctor=(
        {{ (site.container + ["hpcdist", "doctor"])|words }} --ranks "$ranks" --folder "$folder"
{% if spec.gpus %}
#: Each rank must see a GPU.
        --gpus
{% endif %}
    )
    run "${launch[@]}" "${where[@]}" "${doctor[@]}" "$@"
}
{% if spec.spare_nodes %}
#: As many nodes as there are to spare, the worst ones, are listed in a file; what a requeued job found before is void.
rm -f "$folder/excluded-hosts"
examine --spare {{ spec.spare_nodes }} --exclude-file "$folder/excluded-hosts"
status=$?
#: Where none can be named there is nothing to go on with.
((!status)) || [ -s "$folder/excluded-hosts" ] || exit "$status"
#: They are left out.
mapfile -t hosts < <(printf '%s\n' "${hosts[@]}" | grep -vxFf <(tr , '\n' <"$folder/excluded-hosts"))
{% else %}
examine || exit
{% endif %}
{% endif %}
{% if spec.spare_nodes %}

#: The run takes as many hosts as it needs.
hosts=("${hosts[@]:0:{{ spec.nodes }}}")
((${#hosts[@]} == {{ spec.nodes }})) || { echo >&2 "good hosts must be {{ spec.nodes }}; got ${#hosts[@]}."; exit 1; }
place
{% if spec.doctor %}
#: An examination with errors may have been cut short, as by a node that hangs. So the hosts that remain are examined too.
((!status)) || examine || exit
{% endif %}
{% endif %}

#: Where ranks find each other, for torch.distributed and NCCL: the first host, and a port that no other job has.
export MASTER_ADDR="${hosts[0]}" MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
