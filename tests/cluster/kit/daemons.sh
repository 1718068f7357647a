#!/bin/bash
# Starts a host's daemons: munged, and Slurm's in the background.
#
#   daemons.sh NAME FOLDER DAEMON [ARGUMENT]...
#
# FOLDER holds the cluster's state.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
name=$1 folder=$2
shift 2

mount --bind "$folder/etc" /etc/slurm
mkdir -m 755 /run/munge
mkdir -p "$folder/munge/$name" "$folder/spool/$name"
munged --key-file="$folder/munge/key" --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --log-file="$folder/munge/$name/log" --seed-file="$folder/munge/$name/seed" --num-threads=2
env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 "$@" &
