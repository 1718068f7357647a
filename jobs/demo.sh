#!/usr/bin/env bash
# Trains a small convolutional network on handwritten digits on 4 ranks, with three strategies one after the other, and
# compares them in a table. Installs what is missing. Arguments go to each run:  bash jobs/demo.sh --set seed=1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ready
cd "$ROOT"
use_openmpi
trap 'echo; exit 130' INT # else an interrupted run would be followed by the next one

# Every call makes a folder of its own: runs/demo-1, runs/demo-2...
new_folder() {
    local number=1
    mkdir -p runs
    until mkdir "runs/demo-$number" 2>/dev/null; do
        number=$((number + 1))
    done
    echo "runs/demo-$number"
}

PROGRESS=(--progress lines)
if [ -t 1 ]; then # a rank can't tell: the launcher gives it a terminal of its own
    PROGRESS=(--progress live --set log_every=5)
    COLUMNS=$(tput cols 2>/dev/null || echo 80)
    export COLUMNS
fi

FOLDER=$(new_folder)
for strategy in allreduce parameter_server gossip_pull; do
    say "mpirun -n 4 hpcdist train jobs/digits.py --set strategy=$strategy --output $FOLDER/$strategy${*:+ $*}"
    mpirun -n 4 hpcdist train jobs/digits.py --set strategy="$strategy" --output "$FOLDER/$strategy" \
        "${PROGRESS[@]}" "$@"
done

say "hpcdist report $FOLDER"
hpcdist report "$FOLDER"
say "step records of every rank and summary.json of each run are in $ROOT/$FOLDER"
