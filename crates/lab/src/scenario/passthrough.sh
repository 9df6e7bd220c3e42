# SPDX-License-Identifier: Apache-2.0
# Makes ready what a sample of suite passthrough needs, in the lab machine with devices to hand on. Put behind a preamble that
# sets: SCRATCH DISK PAGES MIB HANDED ADDRESS. Where the machine has too few pages of a kind it says so instead of a report, on descriptor 6.

KEPT=0000:03:00.0
THP=/sys/kernel/mm/transparent_hugepage

until [ -b /dev/nvme0n1 ] && [ -e /sys/bus/pci/devices/$KEPT ] && [ -e /sys/bus/pci/devices/0000:02:00.0 ]; do sleep 0.2; done
for at in $HANDED; do
    device=/sys/bus/pci/devices/$at
    echo vfio-pci >$device/driver_override
    [ ! -e $device/driver ] || echo "$at" >$device/driver/unbind
    echo "$at" >/sys/bus/pci/drivers_probe
    [ "$(basename "$(readlink $device/driver)")" = vfio-pci ] || exit 1
done

# Which pages memory of the guest is made of.
echo $([ "$PAGES" = 4K ] && echo never || echo always) >$THP/enabled
kb=
case $PAGES in
2M) kb=2048 ;;
1G) kb=1048576 ;;
esac
if [ -n "$kb" ]; then
    echo 1 >/proc/sys/vm/compact_memory
    pool=/sys/kernel/mm/hugepages/hugepages-${kb}kB/nr_hugepages
    want=$((MIB * 1024 / kb))
    { echo $want >$pool; } 2>/dev/null
    if [ "$(cat $pool 2>/dev/null || echo 0)" != $want ]; then
        printf '%%%% skip the lab machine has too few pages of %s for %s MiB\n%%%% stop\n' "$PAGES" "$MIB" >&6
        exit 1
    fi
fi

# An initrd of busybox, the stock kernel's modules for the root disk, and nothing else: a distribution's own would take seconds
# to unpack that are the same for all.
mkdir -p "$SCRATCH"/tree/bin "$SCRATCH"/tree/modules "$SCRATCH"/tree/dev "$SCRATCH"/tree/mnt "$SCRATCH"/stock
mount -o loop,ro "$DISK" "$SCRATCH"/stock || exit 1
modprobe -d "$SCRATCH"/stock virtio_pci
number=100
for module in $(modprobe -d "$SCRATCH"/stock -S "$(uname -r)" --show-depends -a virtio_pci virtio_blk |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }'); do
    number=$((number + 1))
    cp "$module" "$SCRATCH"/tree/modules/$number.ko
done
umount "$SCRATCH"/stock
cp "$(command -v busybox)" "$SCRATCH"/tree/bin/busybox
cat >"$SCRATCH"/tree/init <<'END'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs d /dev
for module in /modules/*; do insmod $module; done
until [ -b /dev/vda ]; do sleep 0.01; done
mount -t ext4 /dev/vda /mnt
mount --move /dev /mnt/dev
exec switch_root -c /dev/console /mnt /bin/sh "$@"
END
chmod +x "$SCRATCH"/tree/init
(cd "$SCRATCH"/tree && find . | busybox cpio -o -H newc 2>/dev/null) >"$SCRATCH"/initrd
rm -r "$SCRATCH"/tree

# The other end of the card's wire.
if [ -n "$ADDRESS" ]; then
    until kept=$(ls /sys/bus/pci/devices/$KEPT/virtio*/net 2>/dev/null) && [ -n "$kept" ]; do sleep 0.1; done
    ip addr add "$ADDRESS"/24 dev "$kept"
    ip link set "$kept" up
    iperf3 --server --daemon >/dev/null
fi
