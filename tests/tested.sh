# Sourced by tests/run.sh. LATER is a file for the names of tests that passed only when they were run again.

# tested COMMAND...: runs pytest, then once more, alone, what failed: hundreds of these tests start jobs of several processes
# on a machine that does other things too. One or two that pass then are no failure, but the verdicts name them, for each
# has a cause to be found. Of more than two none is run again.
tested() {
    local status=0 cache failed names
    cache=$(mktemp -d)
    failed=$cache/v/cache/lastfailed
    "$@" -o cache_dir="$cache" || status=$?
    if [ "$status" -eq 1 ] && [ -e "$failed" ] && [ "$(grep -c '": true' "$failed")" -le 2 ]; then
        names=$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$failed")
        printf '==> once more, alone: %s\n' "$names"
        if "$@" -o cache_dir="$cache" --last-failed --last-failed-no-failures none --numprocesses 0; then
            status=0
            printf '%s\n' "$names" >>"$LATER"
        fi
    fi
    rm -rf "$cache"
    return "$status"
}
