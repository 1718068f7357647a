#!/bin/bash
# The first process of a host, in namespaces of its own; `hosts.py` starts it. Makes what is the host's alone, says its
# process id, and stays until its standard input ends. With it ends all that runs on the host: however those who made
# it end, nothing is left behind.
#
#   host.sh NAME FOLDER [COMMON]...
#
# FOLDER describes the hosts. In a process namespace of its own, /run and /tmp are the host's alone, too, but for the
# COMMON folders.
set -eu
PATH=$PATH:/usr/sbin:/sbin
name=$1 folder=$2
common=("${@:3}")

read -r pid _ </proc/self/stat # as those who made it see it: /proc is still theirs
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
hostname "$name"
ip link set lo up
if [ $$ -eq 1 ]; then
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys # this network's interfaces; hides cgroups
    mount -t tmpfs -o mode=755 tmpfs /run
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
fi

echo "$pid"
while read -r _; do :; done

[ $$ -ne 1 ] || exit # the kernel ends the others with process 1
while
    left=
    for process in /proc/[0-9]*; do
        if [ "$process" != /proc/$$ ] && [ "$process/ns/net" -ef /proc/$$/ns/net ]; then
            left=1
            kill -9 "${process#/proc/}" || true # it may have ended just now
        fi
    done
    [ -n "$left" ]
do sleep 0.01; done
