#!/bin/bash
# Process 1 of a host, in namespaces of its own: its name, private mounts, munged, and Slurm's daemon.
#
#   host.sh NAME FOLDER COMMON... -- DAEMON [ARGUMENT]...
#
# FOLDER holds the cluster's state; this and the COMMON folders are seen by all hosts, also those under /tmp. Says its
# process id, as those who made it see it, and goes on when it gets a line, for it has a network by then. It ends with
# its standard input, and with it all that runs on the host: however those who made it end, nothing is left behind.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
name=$1 folder=$2 common=()
shift
while [ "$1" != -- ]; do
    common+=("$1")
    shift
done
shift

read -r pid _ </proc/self/stat # /proc is still that of the others
echo "$pid"
mount -t proc proc /proc
mount -t sysfs sysfs /sys # this network's interfaces; hides cgroups
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc" /etc/slurm
for i in "${!common[@]}"; do
    mkdir "/run/common$i"
    mount --bind "${common[i]}" "/run/common$i"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp # where the sessions of two hosts' MPI would clash
for i in "${!common[@]}"; do
    mkdir -p "${common[i]}"
    mount --bind "/run/common$i" "${common[i]}"
    umount "/run/common$i"
done
hostname "$name"

read -r _
mkdir -m 755 /run/munge
mkdir -p "$folder/munge/$name" "$folder/spool/$name"
munged --key-file="$folder/munge/key" --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --log-file="$folder/munge/$name/log" --seed-file="$folder/munge/$name/seed" --num-threads=2
env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 "$@" &
while read -r _; do :; done
