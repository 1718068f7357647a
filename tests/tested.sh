# Sourced by tests/run.sh. DURATIONS is a folder for how long each test took, LATER a file for the names of tests that
# passed only when they were run again.

# tested NAME COMMAND...: runs pytest, then once more, alone, what failed: hundreds of these tests start jobs of several
# processes on a machine that does other things too. A few that pass then are no failure, but the verdicts name them, for
# each has a cause to be found. Of more than AGAIN none is run again.
AGAIN=4
tested() {
    local status=0 cache failed names file=$DURATIONS/$1.xml
    cache=$(mktemp -d) failed=$cache/v/cache/lastfailed
    shift
    "$@" -o cache_dir="$cache" --junitxml "$file" || status=$?
    if [ "$status" -eq 1 ] && [ -e "$failed" ] && [ "$(grep -c '": true' "$failed")" -le "$AGAIN" ]; then
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
