#!/usr/bin/env bash
# Makes the figures of the documentation again: hours on 2 free cores. What is complete is not made again, and what was
# interrupted goes on, so the same command may be given as often as it takes.
#
#   bash jobs/evidence.sh                 all parts, into runs/evidence/NAME
#   bash jobs/evidence.sh --only NAME     one part; may be repeated
#   bash jobs/evidence.sh --quick         a small version of each, in minutes, into runs/evidence-quick/NAME
#   bash jobs/evidence.sh --list          the parts, the minutes that each takes, and the tables it is behind
#   bash jobs/evidence.sh --print         the commands, none of which is run
#
# A part that fails does not keep the others from being made; the exit status is 1 then. Installs what is missing, as
# jobs/demo.sh does, unless there is an `hpcdist` to run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

PARTS=( # name; minutes on 2 free cores; tables, or where else the numbers stand
    "rates 8 -"
    "compression 15 compression"
    "modulation 35 modulation"
    "gossip 16 gossip"
    "slow-link 14 slow-link"
    "sandblaster 35 sandblaster"
    "networks 15 networks"
    "slow-network 30 slow-network"
    "staleness 15 staleness"
    "scaling 15 scaling-stragglers,scaling-even"
    "regression 6 regression,regression-job"
    "devices 15 devices,devices-epochs"
    "benchmarks 21 allreduce,collectives,torch,torch-steps,horovod,horovod-calls,step,server,steps,strategies,pipeline,compress"
    "learning-rate 6 learning-rate,learning-rate-others"
    "recent 270 recent"
    "options 45 options,slowmo"
    "labels 15 labels"
    "clusters 45 clusters"
    "memory 6 memory"
    "digits 5 docs/installing.md,docs/simulate.md,docs/studies/benchmarks.md"
)

# --- the parts: each prints its commands, one per line ----------------------------------------------------------------
# A perceptron of 203,530 parameters on Fashion-MNIST, by plain SGD at the rate 0.2 in all parts but `modulation`.
fashion() { echo hpcdist simulate jobs/fashion.py --seeds $SEEDS --no-controls $*; }

strategies() { printf -- '--strategies %s ' "$@"; }

table() { echo python docs/tables.py $1 $OUT/$1 $OUT/$1/table.csv; }

# Searches the rates that stand below, on seeds from which no result comes: after one pass over the data.
rates() {
    local with=allreduce:compression search="--seeds 1 --budget samples=60000 --tune 5"
    fashion --ranks 2,4 --compute 1ms $search --set schedule.gamma=0.1 --output $OUT/rates/dgc \
        $(strategies $with=dgc,compression.ratio=0.001)
    fashion --ranks 2,4 --compute 1ms $search --set schedule.gamma=0.1 --output $OUT/rates/signsgd \
        $(strategies $with=signsgd) --set optimizer.lr=0.001
    fashion --ranks 17 --compute jitter:20ms,0.2 $search --output $OUT/rates/modulation \
        $(strategies hardsync) --set batch_size=8 --set optimizer.lr=0.02 --set optimizer.momentum=0.9
}

# On virtual ranks accuracies and bytes are those of real ones, and a run takes as long as its arithmetic. All
# compressors have the rate of the uncompressed run but two: dgc has a momentum of its own, which makes one step ten, and
# with signsgd the rate is what each element moves.
compression() {
    local with=allreduce:compression
    local topk=$with=topk,compression.ratio dgc=$with=dgc,compression.ratio=0.001
    local threshold=$with=threshold,compression.density
    fashion --ranks 2,4 --compute 1ms ${EPOCHS:---set epochs=2 --set schedule.gamma=0.1} --output $OUT/compression \
        --rate $dgc=0.05 --rate $dgc,compression.values=fp16=0.05 --rate $with=signsgd=0.0005 \
        $(strategies allreduce $with={fp16,bf16,qsgd,terngrad,onebit,ef_signsgd,signsgd} \
            $with=powersgd,compression.rank={4,1} $topk={0.01,0.001} $topk=0.001,compression.values=fp16 \
            $dgc $dgc,compression.values=fp16 $threshold={0.01,0.002,0.001})
    table compression
}

# 16 workers with batches of 8 and a server, momentum 0.9; parameter_server is softsync with splits = 16, to the bit. A
# run that diverges goes on to its end.
modulation() {
    fashion --ranks 17 --compute jitter:20ms,0.2 $EPOCHS --output $OUT/modulation \
        --set batch_size=8 --set optimizer.lr=0.04 --set optimizer.momentum=0.9 \
        --set on_nonfinite=skip --set max_skipped=1000000 \
        $(strategies hardsync softsync:splits={1,4} softsync:splits=4,modulation={average,per-gradient} \
            parameter_server parameter_server:modulation={average,per-gradient})
    table modulation
}

gossip() {
    local compute
    for compute in jitter:20ms,0.1 straggler:3,4,jitter:20ms,0.1 exponential:20ms; do
        fashion --ranks 16 --compute $compute $CURVE --target accuracy=0.82 --output $OUT/gossip/${compute%%:*} \
            $(strategies allreduce gossip_pull gossip_push adpsgd)
    done
    table gossip
}

slow-link() {
    local with=allreduce:compression
    fashion --ranks 4 --network 100us,100Mbit/s --compute jitter:2ms,0.1 $CURVE --target accuracy=0.85 \
        --output $OUT/slow-link $(strategies allreduce $with=fp16 $with=powersgd,compression.rank=4 \
            $with=topk,compression.ratio=0.01 $with=threshold,compression.density=0.002 \
            local_sgd:period=8 gossip_pull strom)
    table slow-link
}

# The step of 2 ms is of 32 samples in all of them: 64 ms are those of 1024.
sandblaster() {
    local out=$OUT/sandblaster with="--network 100us,1Gbit/s --target accuracy=0.8"
    fashion --ranks 4 --compute jitter:2ms,0.1 ${EPOCHS:---budget samples=36000 --evaluations 30} $with \
        --output $out/4 $(strategies allreduce downpour)
    fashion --ranks 4 --compute jitter:64ms,0.1 ${EPOCHS:---budget samples=140000 --evaluations 35} $with \
        --output $out/4-large $(strategies sandblaster) --set batch_size=1024
    fashion --ranks 64 --compute jitter:2ms,0.1 ${EPOCHS:---budget samples=300000 --evaluations 50} $with \
        --output $out/64 $(strategies allreduce) --set optimizer.lr=0.4 --set schedule.gamma=1
    fashion --ranks 64 --compute jitter:2ms,0.1 ${EPOCHS:---budget samples=300000 --evaluations 50} $with \
        --output $out/64-downpour $(strategies downpour:servers=4 downpour:servers=4,rate=0.02)
    fashion --ranks 64 --compute jitter:2ms,0.1 ${EPOCHS:---budget samples=180000 --evaluations 30} $with \
        --output $out/64-large $(strategies sandblaster:servers=4,portions=1)
    # The same on real ranks, for seconds of a clock; four ranks on 2 cores.
    with="--no-controls --ranks 4 --seeds $SEEDS --target accuracy=0.8"
    echo hpcdist compare jobs/fashion.py $with ${EPOCHS:---budget samples=36000 --evaluations 30} \
        --output $out/4-real $(strategies allreduce downpour)
    echo hpcdist compare jobs/fashion.py $with ${EPOCHS:---budget samples=140000 --evaluations 35} \
        --output $out/4-real-large $(strategies sandblaster) --set batch_size=1024
    table sandblaster
}

networks() { echo python jobs/studies/network.py $SMALL --output $OUT/networks; } # as root, on shaped networks
slow-network() { echo python jobs/studies/network.py $SMALL --slowest --seeds $SEEDS --output $OUT/slow-network; }
staleness() { echo python jobs/studies/staleness.py $SMALL --output $OUT/staleness; }
scaling() { echo python jobs/studies/scaling.py $SMALL --output $OUT/scaling; }
regression() { echo python jobs/studies/regression.py $SMALL --output $OUT/regression; }
clusters() { echo python jobs/studies/clusters.py $SMALL --output $OUT/clusters; }

# The rate as it is, by both rules, and by the linear one after a warm-up; then other strategies. See docs/learning-rate.md.
learning-rate() {
    local sgd="--set optimizer.name=SGD --set optimizer.momentum=0.9 --set optimizer.lr=0.02 --set epochs=10"
    local digits="hpcdist simulate jobs/digits.py --compute 5ms --no-controls --seeds $SEEDS $sgd" out=$OUT/learning-rate rule
    local reference="--set optimizer.reference_batch=16" falls="--set schedule.gamma=0.8"
    echo $digits --ranks 1,8,32 $(strategies allreduce) $falls --output $out/none
    for rule in sqrt linear; do
        echo $digits --ranks 8,32 $(strategies allreduce) $falls --set optimizer.scale=$rule $reference --output $out/$rule
    done
    local warm="$(strategies allreduce) --set optimizer.scale=linear $reference --set schedule.per=step"
    echo $digits --ranks 8 $warm --set schedule.gamma=0.9816 --set schedule.warmup_steps=24 --output $out/warm-8
    echo $digits --ranks 32 $warm --set schedule.gamma=0.928 --set schedule.warmup_steps=6 --output $out/warm-32
    echo $digits --ranks 8 $falls --output $out/others \
        $(strategies gossip_pull local_sgd:period=8 parameter_server parameter_server:modulation=per-gradient strom)
    echo $digits --ranks 8 $falls --set optimizer.scale=linear $reference --output $out/others-linear \
        $(strategies gossip_pull local_sgd:period=8)
    echo $digits --ranks 8 $falls --set optimizer.lr=0.0025 --output $out/strom $(strategies strom)
}

# What came after DiLoCo: a small transformer whose steps take 5 ms, on a slow network and on one ten times faster; and on
# four real ranks, each on a host of its own (as root), for seconds of a clock. The rate of each strategy is searched on
# the slow virtual network, in as many runs, and is that of all. Momentum in one bit needs a larger ε, and demo steps
# along signs, by SGD.
recent() {
    local ranks batch network with out every=period=20 begins streaming=streaming_diloco:period=20,fragment_layers=1
    local strategies="$(strategies allreduce local_sgd:$every diloco:$every strom slowmo:$every noloco:$every sparta \
        sparse_loco:$every $streaming $streaming,compression=e3m0 $streaming,merge=eager \
        async_diloco:$every,servers=colocated,outer_momentum={0.9,0.5} "'dion:others=[\"0.*\",\"4.*\"],rate=3'")"
    for ranks in 4 16; do
        batch=$((ranks == 4 ? 16 : 8)) begins=$((ranks == 4 ? 90 : 45)) # a third of the steps
        for network in 100Mbit/s 1Gbit/s; do
            out=$OUT/recent/$ranks-${network%/s}
            with="$(transformer simulate $ranks $batch) --network 100us,$network --compute jitter:5ms,0.1"
            echo $with $(searched "$out") "$strategies"
            echo $with $(searched "$out-graphs") $(strategies d2 gradient_tracking)
            echo $with $(searched "$out-momentum") --set optimizer.name=SGD --set optimizer.momentum=0.9 \
                --set optimizer.lr=0.1 $(strategies allreduce qg_dsgd)
            echo $with $(searched "$out-bits") --set optimizer.eps=1e-4 \
                $(strategies allreduce onebit_adam:warmup_steps=$begins zero_one_adam:variance_steps=$begins)
            echo $with $(searched "$out-signs") --set optimizer.name=SGD --set optimizer.lr=0.001 $(strategies demo)
        done
    done
    echo $(transformer compare 4 16) "--launcher 'python jobs/studies/on_hosts.py 100'" --set internode=tcp:eth0 \
        --output $OUT/recent/4-real "\$(found_rates $OUT/recent/4-100Mbit)" "$strategies"
    table recent
}

transformer() { # simulate or compare, ranks, batch size
    echo hpcdist $1 jobs/transformer.py --ranks $2 --set batch_size=$3 --seeds $SEEDS --no-controls \
        --set model.width=32 --set model.blocks=2 --set schedule.gamma=0.9 --target bits_per_byte=3.5 \
        ${EPOCHS:---budget samples=19200 --evaluations 15}
}

# Where a comparison's runs go, and its rates: searched on the slow network, and on the other one as they were found there.
searched() { # a folder
    local slow=${1/1Gbit/100Mbit}
    echo "--output $1" "$([ "$slow" = "$1" ] && echo "$TUNE" || echo "\$(found_rates $slow)")"
}

found_rates() { # the folder of a comparison
    python - "$1" <<'END'
import json, pathlib, sys
tuning = json.loads(pathlib.Path(sys.argv[1], "comparison.json").read_text())["tuning"]
print(*(f"--rate {found['name']}={found['rate']}" for found in (tuning["chosen"] if tuning else ())))
END
}

# What the publications say of options: the same transformer at the rates that `recent` has found; the slow momentum, on
# digits that are dealt out by label.
options() {
    local with out=$OUT/options streaming=streaming_diloco:fragment_layers=1
    with="$(transformer simulate 4 16) --network 100us,1Gbit/s --compute jitter:5ms,0.1"
    echo $with --set optimizer.lr=0.006 --output $out/delay \
        $(strategies $streaming,period=20,delay={1,5,15},blend={0,0.5} $streaming,period=20,delay={1,5,15},merge=shift)
    echo $with --set optimizer.lr=0.006 --output $out/late \
        $(strategies $streaming,period={10,20,40} $streaming,period={10,20,40},merge={delayed,eager})
    echo $with --set optimizer.lr=0.012 --output $out/sparse \
        $(strategies sparse_loco:period={5,15,50},compression.ratio={0.01,0.05,0.25})
    echo $with --set optimizer.lr=0.003 --output $out/dense $(strategies diloco:period={5,15,50},outer_momentum={0.9,0})
    echo $with --set optimizer.lr=0.003 --output $out/parts $(strategies sparta:share={0.001,0.005,0.05,1})
    echo $with --set optimizer.lr=0.006 --output $out/order \
        $(strategies streaming_diloco:fragment_layers=2,period=20,order={strided,sequential})
    echo $with $TUNE --set optimizer.name=SGD --set optimizer.lr=0.001 --output $out/signs \
        $(strategies demo:transform={dct,none})
    echo hpcdist simulate jobs/digits.py --ranks 8 --compute 5ms --seeds $SEEDS --no-controls $TUNE --set schedule=none \
        --set optimizer.name=SGD --set optimizer.lr=0.05 --set data.split=dirichlet --set data.alpha=0.1 \
        ${EPOCHS:---budget samples=43110 --evaluations 10} --output $OUT/slowmo \
        $(strategies slowmo:period={12,48},slow_momentum={0,0.5,0.7})
    table options
    table slowmo
}

# 16 workers on a ring, whose digits are dealt out by label, the less evenly the smaller alpha is.
labels() {
    local alpha sgd="--set optimizer.name=SGD --set schedule=none" with
    for alpha in 0.1 1 10; do
        with="hpcdist simulate jobs/digits.py --ranks 16 --compute 5ms --seeds $SEEDS --no-controls $TUNE $sgd"
        with+=" --set data.split=dirichlet --set data.alpha=$alpha ${EPOCHS:---budget samples=43110 --evaluations 10}"
        echo $with --output $OUT/labels/plain-$alpha --set optimizer.lr=0.1 \
            $(strategies allreduce dpsgd d2 gradient_tracking)
        echo $with --output $OUT/labels/momentum-$alpha --set optimizer.lr=0.02 --set optimizer.momentum=0.9 \
            $(strategies allreduce dpsgd gradient_tracking qg_dsgd)
    done
    table labels
}

memory() {
    local measure="env MALLOC_MMAP_THRESHOLD_=1048576 mpirun -n 4 python jobs/studies/memory.py" name
    for name in allreduce gossip_{pull,push,sync} dpsgd adpsgd sgp strom hardsync parameter_server easgd; do
        echo $measure $name
    done
    for name in local_sgd diloco; do echo $measure $name --set period=4; done
    for name in topk powersgd; do echo $measure allreduce --set compression=$name; done
    echo $measure allreduce --adam
}

devices() {
    local alone="hpcdist compare jobs/mnist.py --ranks 1 --seeds 1 --no-controls $EPOCHS"
    echo python jobs/studies/devices.py --samples $DEVICE_SAMPLES --seeds 2 --ranks 1,2 --output $OUT/devices/study
    echo $alone --output $OUT/devices/adam
    echo $alone --output $OUT/devices/sgd \
        --set optimizer.name=SGD --set optimizer.lr=0.03 --set optimizer.momentum=0.9
}

benchmarks() {
    local name json="--json $OUT/benchmarks"
    echo mpirun -n 2 hpcdist bench allreduce $ROUNDS $json/allreduce-2.json
    echo mpirun -n 4 hpcdist bench allreduce $ROUNDS $json/allreduce-4.json
    echo mpirun -n 2 hpcdist bench collectives $ROUNDS --sizes={4096,65536,1048576,4194304,16777216,67108864} \
        $json/collectives.json
    echo mpirun -n 2 hpcdist bench torch $ROUNDS --sizes={4096,65536,1048576,4194304,16777216,67108864} \
        $json/torch.json
    echo hpcdist horovod build
    echo mpirun -n 2 hpcdist bench horovod $ROUNDS $json/horovod-calls.json
    echo mpirun -n 2 hpcdist bench train $ROUNDS $json/train.json
    echo mpirun -n 5 hpcdist bench server $ROUNDS $json/server.json
    echo mpirun -n 2 hpcdist bench window $ROUNDS $json/window.json
    echo mpirun -n 2 hpcdist bench gossip $ROUNDS $json/gossip.json
    echo mpirun -n 2 hpcdist bench pipeline $ROUNDS $json/pipeline.json
    echo hpcdist bench compress $ROUNDS $json/coding.json
    echo mpirun -n 2 hpcdist bench compress $ROUNDS $json/compress.json
    echo hpcdist bench loader $json/loader.json
    echo hpcdist bench checkpoint $ROUNDS $json/checkpoint.json
    echo mpirun -n 2 hpcdist bench checkpoint $ROUNDS $json/checkpoint-2.json
    for name in allreduce collectives torch torch-steps horovod-calls step server steps strategies compress; do
        echo python docs/tables.py $name $OUT/benchmarks $OUT/benchmarks/$name.csv
    done
}

digits() {
    local strategy density=compression=threshold,compression.density
    for strategy in allreduce parameter_server gossip_pull; do
        echo mpirun -n 4 hpcdist train jobs/digits.py --set strategy=$strategy --resume \
            --output $OUT/digits/demo/$strategy
    done
    echo hpcdist report $OUT/digits/demo
    echo hpcdist simulate jobs/digits.py --ranks 16 --strategies allreduce,softsync:splits=4,gossip_pull \
        --network 50us,1Gbit/s --compute jitter:5ms,0.3 --budget samples=14370 --target accuracy=0.93 \
        --output $OUT/digits/simulate
    echo hpcdist compare jobs/digits.py --ranks 2 --seeds $SEEDS --no-controls --output $OUT/digits/threshold-2 \
        --strategies allreduce,allreduce:$density=0.005 $EPOCHS
    echo hpcdist compare jobs/digits.py --ranks 4 --seeds $SEEDS --no-controls --output $OUT/digits/threshold-4 \
        --strategies allreduce,allreduce:$density=0.0025 --set batch_size=8 $EPOCHS
}

# --- running them -----------------------------------------------------------------------------------------------------
is_done() { grep -Fxqs -- "$2" "$OUT/$1/done"; } # a part's name, a command

is_complete() {
    local command
    while read -r command; do
        is_done "$1" "$command" || return 1
    done < <("$1")
}

run_part() {
    local command
    mkdir -p "$OUT/$1"
    while read -r command; do
        is_done "$1" "$command" && continue
        say "$command"
        eval "$command" </dev/null || return 1
        echo "$command" >>"$OUT/$1/done"
    done < <("$1")
}

list() {
    local part name minutes behind
    printf '%-12s %7s  %-8s %s\n' part minutes '' tables
    for part in "${PARTS[@]}"; do
        read -r name minutes behind <<<"$part"
        printf '%-12s %7s  %-8s %s\n' "$name" "$minutes" "$(is_complete "$name" && echo complete)" "$behind"
    done
}

main() {
    local action=run_part chosen=() failed=() name
    OUT=runs/evidence SEEDS=5 EPOCHS="" CURVE="--budget samples=480000 --evaluations 48"
    SMALL="" ROUNDS="" DEVICE_SAMPLES=60000 TUNE="--tune 4"
    while [ $# -gt 0 ]; do
        case $1 in
            --quick)
                OUT=runs/evidence-quick SEEDS=1 EPOCHS="--budget samples=1280 --evaluations 2" CURVE=$EPOCHS
                SMALL=--quick ROUNDS="--rounds 1" DEVICE_SAMPLES=640 TUNE=""
                ;;
            --only)
                [[ " ${PARTS[*]%% *} " == *" ${2:-} "* ]] || fail "--only must be one of ${PARTS[*]%% *}; got '${2:-}'"
                chosen+=("$2") && shift
                ;;
            --list) action=list ;;
            --print) action=print ;;
            *) fail "options are --quick, --only NAME, --list and --print; got $1" ;;
        esac
        shift
    done
    [ $action = list ] && { list; return; }
    [ ${#chosen[@]} -gt 0 ] || chosen=("${PARTS[@]%% *}")
    if [ $action = print ]; then
        for name in "${chosen[@]}"; do "$name"; done
        return
    fi
    command -v hpcdist >/dev/null || { ready && use_openmpi; }
    trap 'echo; exit 130' INT # else an interrupted part would be followed by the next one
    for name in "${chosen[@]}"; do
        run_part "$name" || failed+=("$name")
    done
    [ ${#failed[@]} -eq 0 ] || fail "these parts have failed: ${failed[*]}. The same command goes on with them"
    say "all of ${chosen[*]} are complete, in $ROOT/$OUT"
}

main "$@"
