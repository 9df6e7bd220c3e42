#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs in the lab machine with devices to hand on (`scripts/bench-passthrough` brings it there): how long a guest takes to
# user space with the NVMe disk passed through, by kind of page, tare beside QEMU, and the phases of tare's start.
# SIZE: the guest's memory in MiB.
set -u
cd /lab || exit 1
SIZE=${SIZE:-1024}
NVME=0000:01:00.0
OFF='sync;echo o >/proc/sysrq-trigger;sleep 60'
THP=/sys/kernel/mm/transparent_hugepage/enabled

# An initrd of nothing but busybox: the stock kernel has what it needs for a serial console.
mkdir -p initrd/bin initrd/proc initrd/sys initrd/dev
cp "$(command -v busybox)" initrd/bin/busybox
cat >initrd/init <<'END'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc
mount -t devtmpfs d /dev
exec </dev/console >/dev/console 2>&1
exec sh "$@"
END
chmod +x initrd/init
(cd initrd && find . | busybox cpio -o -H newc 2>/dev/null) >small.img

until [ -b /dev/nvme0n1 ]; do sleep 0.2; done
tare passthrough bind $NVME >/dev/null || exit 1

# Notes when the guest says that user space is there.
marker() {
    while IFS= read -r line; do
        case $line in *USERSPACE*) date +%s.%N >/lab/seen ;; esac
    done
}

# Seconds from $1 to that moment.
span() {
    awk -v a="$1" -v b="$(cat /lab/seen)" 'BEGIN { printf "%.2f", b - a }'
}

# Sets aside what pages of kind $1 need; says so when the machine has too few.
pages() {
    for kb in 2048 1048576; do
        echo 0 >/sys/kernel/mm/hugepages/hugepages-${kb}kB/nr_hugepages
    done
    echo "$([ "$1" = 4K ] && echo never || echo always)" >$THP
    case $1 in
    2M) kb=2048 ;;
    1G) kb=1048576 ;;
    *) return 0 ;;
    esac
    echo 1 >/proc/sys/vm/compact_memory
    want=$((SIZE * 1024 / kb))
    echo $want >/sys/kernel/mm/hugepages/hugepages-${kb}kB/nr_hugepages
    [ "$(cat /sys/kernel/mm/hugepages/hugepages-${kb}kB/nr_hugepages)" = $want ] || {
        echo "$1: this machine has too few"
        return 1
    }
}

for kind in 4K thp 2M 1G; do
    pages $kind || continue
    case $kind in
    2M | 1G) backend=memory-backend-memfd,hugetlb=on,hugetlbsize=$kind ;;
    *) backend=memory-backend-ram ;;
    esac
    line="console=ttyS0 quiet panic=-1 -- -c \"echo USERSPACE;$OFF\""
    rm -f seen
    begin=$(date +%s.%N)
    timeout 100 tare run --kernel vmlinuz --initrd small.img --console serial --memory "size=${SIZE}M,pages=$kind,prealloc=parallel" \
        --cpus 2 --vfio $NVME --no-rng --cmdline "$line" --ledger - </dev/null 2>ledger | marker
    [ -e seen ] || { cat ledger; exit 1; }
    printf '%-4s tare %6s s to user space: %s\n' $kind "$(span "$begin")" "$(grep -o 'mmap.*huge' ledger)"
    rm -f seen
    begin=$(date +%s.%N)
    timeout 100 qemu-system-x86_64 -M q35,accel=kvm,memory-backend=ram -cpu host -smp 2 -m ${SIZE}M -nodefaults -no-user-config \
        -display none -object $backend,id=ram,size=${SIZE}M,prealloc=on,prealloc-threads=2 -serial stdio -no-reboot \
        -device vfio-pci,host=$NVME -kernel vmlinuz -initrd small.img -append "$line" </dev/null 2>qemu.log | marker
    [ -e seen ] || { cat qemu.log; exit 1; }
    printf '%-4s qemu %6s s to user space\n' $kind "$(span "$begin")"
done
