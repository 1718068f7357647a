{% if spec.doctor %}

#: The nodes are examined before the run: does MPI see all ranks, is a link slow, a GPU taken, the disk full? An error
#: ends the job here, within half a minute.
examine=({{ (site.container + ["hpcdist", "doctor"])|words }} --ranks "$ranks" --folder "$folder"
{% if spec.gpus %}
#: Each rank must see a GPU.
    --gpus
{% endif %}
{% if spec.spare_nodes %}
#: As many nodes as there are to spare, the worst ones, are listed in a file.
    --spare {{ spec.spare_nodes }} --exclude-file "$folder/excluded-hosts"
{% endif %}
)
run "${launch[@]}" "${where[@]}" "${examine[@]}" || exit
{% if spec.spare_nodes %}
#: They are left out.
mapfile -t hosts < <(printf '%s\n' "${hosts[@]}" | grep -vxFf <(tr , '\n' <"$folder/excluded-hosts"))
{% endif %}
{% endif %}
{% if spec.spare_nodes %}

#: The run takes as many hosts as it needs.
hosts=("${hosts[@]:0:{{ spec.nodes }}}")
((${#hosts[@]} == {{ spec.nodes }})) || { echo >&2 "good hosts must be {{ spec.nodes }}; got ${#hosts[@]}."; exit 1; }
place
{% endif %}

#: Where ranks find each other, for torch.distributed and NCCL: the first host, and a port that no other job has.
export MASTER_ADDR="${hosts[0]}" MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
