#!/bin/bash
# The controller's daemons where there is accounting: a database, Slurm's daemon for it, and the controller itself.
#
#   accounting.sh FOLDER
#
# The database has no users and no network, and would keep nothing through a power failure. All end with the host.
set -eu
folder=$1
mkdir /run/mysqld "$folder/database" # slurmdbd looks for Debian's socket; each host has a /run of its own
{
    printf '%s\n' "CREATE DATABASE mysql;" "USE mysql;"
    cat /usr/share/mysql/mysql_system_tables.sql # for the procedures that slurmdbd stores
} >"$folder/database.sql"
mariadbd --no-defaults --user=root --skip-networking --skip-grant-tables --socket=/run/mysqld/mysqld.sock \
    --datadir="$folder/database" --init-file="$folder/database.sql" --log-error="$folder/log/mariadbd.log" \
    --innodb-flush-log-at-trx-commit=0 --innodb-flush-method=nosync \
    --innodb-log-file-size=4M --innodb-autoextend-increment=1 &
until [ -S /run/mysqld/mysqld.sock ]; do sleep 0.05; done
slurmdbd -D &
until sacctmgr --noheader list cluster >/dev/null 2>&1; do sleep 0.05; done # a controller that found none would give up
exec slurmctld -D -c
