#!/usr/bin/env bash
# Grain's IndexSampler with shuffle=True: each process has the same samples in all epochs, and only their order changes.
#
# Guess: the shuffle is global, as its documentation says ("Global shuffle of the data"), so that each process gets
# other samples in each epoch, as with torch's DistributedSampler.
# Seen: grain 0.2.18, numpy 2.4.6, 2 shards of 12 records. The records are first cut into consecutive shards, and then
# each shard is shuffled. Shard 0 has records 0 to 5 in each epoch, and shard 1 has 6 to 11. The orders are the same,
# too, but for an offset of 6. Without sharding (shard_count=1) all records are mixed.
# Why it matters: data sets are often sorted by class, date or source. Each process then trains on its own classes for
# the whole run: a batch over all processes is never mixed across shards, BatchNorm's statistics are those of few
# classes, and local SGD or DiLoCo average models that have seen different distributions.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grain==0.2.18 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import grain.python as grain

for shards in (1, 2):
    for shard in range(shards):
        options = grain.ShardOptions(shard_index=shard, shard_count=shards)
        sampler = grain.IndexSampler(12, shard_options=options, shuffle=True, num_epochs=3, seed=0)
        records = list(grain.DataLoader(data_source=range(12), sampler=sampler, worker_count=0))
        size = len(records) // 3
        epochs = [" ".join(map(str, records[start : start + size])) for start in range(0, len(records), size)]
        print(f"shard {shard} of {shards}:", " | ".join(epochs))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
shard 0 of 1: 0 4 10 11 8 3 1 9 5 2 6 7 | 11 7 6 0 4 8 9 2 10 3 1 5 | 8 4 1 7 6 9 3 2 0 5 11 10
shard 0 of 2: 0 4 1 2 5 3 | 5 2 3 0 4 1 | 0 4 1 2 3 5
shard 1 of 2: 6 10 7 8 11 9 | 11 8 9 6 10 7 | 6 10 7 8 9 11
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
