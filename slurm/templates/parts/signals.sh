{% if spec.shape == "interactive" %}
#: In a terminal Ctrl-C reaches the ranks by itself.
run() { "$@"; }
{% else %}
#: A signal to this script goes on to the launcher, and from there to the ranks: they save together and leave with
#: status 75. USR1 comes ahead of the time limit, TERM when the job is cancelled or preempted.
launcher= ended=
pass_on() {
    again=1
    [ -z "$launcher" ] || kill -USR1 "$launcher"
}
trap pass_on USR1
trap 'ended=1; pass_on' TERM

#: Runs a command to its end and returns its status. A signal ends `wait` early, which then is to be done again.
run() {
    local status
    "$@" &
    launcher=$! again=1
    while ((again)); do
        again=0
        wait "$launcher"
        status=$?
    done
    launcher=
    return "$status"
}
{% endif %}
