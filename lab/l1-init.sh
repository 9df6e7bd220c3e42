#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# First program of the lab machine: mounts, modules, a disk in memory; then the agent takes over as process 1.
# Whatever fails here is said on the console, which the lab keeps as a log, and ends the machine.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOME=/root
export PATH HOME

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t cgroup2 cgroup2 /sys/fs/cgroup

# The disk of measured runs: ext4 in memory, sparse, sized by the lab.
DISK_KIB=$(sed -n 's/.*tare\.disk_kib=\([0-9]*\).*/\1/p' /proc/cmdline)
while read -r module options; do
    case $module in
    '' | '#'*) ;;
    brd) modprobe brd "rd_nr=1" "rd_size=$DISK_KIB" ;;
    # shellcheck disable=SC2086
    *) modprobe "$module" $options ;;
    esac
done </etc/tare/modules
mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0,nodiscard /dev/ram0
mkdir -p /lab
mount -o noatime /dev/ram0 /lab
mkdir -p /lab/bin

ip link set lo up
echo 1 >/proc/sys/kernel/sysrq
[ -c /dev/kvm ] || { echo "lab machine: /dev/kvm is missing" >&2; exit 1; }
PATH=/lab/bin:$PATH
exec /sbin/tare-agent
