// SPDX-License-Identifier: Apache-2.0
//! Devices of the host in a real guest: an NVMe disk and a network card go from the lab machine's drivers to a guest and come
//! back, and what can't be handed on is refused with a line that helps.

use crate::lab::{Place, script_in};

/// A stock kernel and Debian's own fio and iperf3 on a disk and a card that are the host's.
#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_verifies_an_nvme_disk_and_moves_packets_through_a_card_of_the_host() {
    let printed = script_in(
        Place::Passthrough,
        r#"
passthrough_devices
echo "== refused"
refused --kernel /lab/vmlinuz --vfio $NVME
refused --kernel /lab/vmlinuz --vfio 0000:7f:00.0
mkfs.ext4 -q /dev/nvme0n1 && mkdir -p /lab/mounted && mount /dev/nvme0n1 /lab/mounted
tare passthrough bind $NVME 2>&1
echo "status $?"
umount /lab/mounted
head -c 4194304 /dev/urandom >/lab/data
dd if=/lab/data of=/dev/nvme0n1 bs=1M seek=512 conv=fsync 2>/dev/null
echo "== bound"
tare passthrough bind $NVME $CARD
tare passthrough list | grep -E "$NVME|$CARD"
echo "here $(sha256sum </lab/data)"
in_stock_root work '
fio --name=v --filename=/dev/nvme0n1 --rw=randwrite --bs=4k --size=8M --ioengine=libaio --direct=1 --iodepth=16 \
    --verify=crc32c --do_verify=1 --verify_fatal=1 >/tmp/fio
echo "fio $?"
grep -c "err= 0" /tmp/fio
echo "inside $(dd if=/dev/nvme0n1 bs=1M skip=512 count=4 iflag=direct 2>/dev/null | sha256sum)"
modprobe vmxnet3
card=$(ls /sys/bus/pci/drivers/vmxnet3/0000:*/net)
ip addr add 10.9.0.2/24 dev $card
ip link set $card up
for try in 1 2 3 4 5 6 7 8; do ping -c 1 -W 1 10.9.0.1 >/dev/null 2>&1 && break; done
iperf3 -c 10.9.0.1 -n 4M | grep -E "sender|receiver"
echo "iperf3 ${PIPESTATUS[0]}"
'
kept_card 10.9.0.1/24
iperf3 -s -D
echo "== guest"
MEMORY=size=512M,prealloc=parallel guest "$ROOT;chroot /mnt bash /work;umount /mnt/*;umount /mnt;$OFF" \
    --disk path=/lab/root.ext4 --cpus 2 --vfio $NVME --vfio $CARD --ledger - 2>/lab/ledger
grep start-up: /lab/ledger
echo "== busy"
guest "echo up;sleep 30" --vfio $NVME >/lab/first 2>&1 &
until grep -q '^up' /lab/first; do sleep 0.2; done
refused --kernel /lab/vmlinuz --vfio $NVME
tare passthrough unbind $NVME 2>&1
echo "status $?"
pkill -9 -x tare
wait
echo "== back"
tare passthrough unbind $NVME
echo "status $?"
until [ -b /dev/nvme0n1 ]; do sleep 0.2; done
echo "again $(dd if=/dev/nvme0n1 bs=1M skip=512 count=4 iflag=direct 2>/dev/null | sha256sum)"
echo "== restarts"
# Each boot adds a line to a block of the disk, and resets the machine until there are three.
BLOCK='bs=4k count=1 seek=100000 oflag=direct conv=sync'
# shellcheck disable=SC2086
dd if=/dev/zero of=/dev/nvme0n1 $BLOCK 2>/dev/null
tare passthrough bind $NVME
guest 'n=$(dd if=/dev/nvme0n1 bs=4k count=1 skip=100000 iflag=direct 2>/dev/null | grep -c line);echo boot $n;yes line | head -n $((n+1)) | dd of=/dev/nvme0n1 '"$BLOCK"' 2>/dev/null;[ $n = 2 ] || echo b >/proc/sysrq-trigger;echo o >/proc/sysrq-trigger;sleep 60' --vfio $NVME 2>&1
"#,
        &[],
    );
    let refused = printed.part("refused");
    assert!(refused.contains("belongs to nvme, not to vfio-pci: --vfio; `tare passthrough bind"), "{printed:#?}");
    assert!(refused.contains("this host has no PCI device 0000:7f:00.0: --vfio; "), "{printed:#?}");
    assert!(refused.contains("is mounted at /lab/mounted: bind; "), "{printed:#?}");
    assert_eq!(refused.matches("status 2").count(), 3, "{printed:#?}");
    assert_eq!(printed.part("bound").matches("nothing: ready").count(), 2, "{printed:#?}");
    let sum = |part: &str, name: &str| {
        let line = printed.part(part).lines().find_map(|line| line.trim_end().strip_prefix(name).map(str::to_owned));
        line.unwrap_or_else(|| panic!("no line '{name}' in {printed:#?}"))
    };
    let here = sum("bound", "here ");
    assert_eq!(sum("guest", "inside "), here);
    assert_eq!(sum("back", "again "), here, "the host finds what it wrote");
    let guest = printed.part("guest");
    assert!(guest.contains("fio 0") && guest.contains("iperf3 0") && guest.contains("receiver"), "{printed:#?}");
    assert!(guest.contains("status 0") && guest.contains("512 MiB ready"), "{printed:#?}");
    let busy = printed.part("busy");
    assert!(busy.contains("is in use, another process has /dev/vfio/"), "{printed:#?}");
    assert!(busy.contains("is in use, a machine has its group"), "{printed:#?}");
    assert_eq!(busy.matches("status 2").count(), 2, "{printed:#?}");
    let boots: Vec<_> = printed
        .part("restarts")
        .lines()
        .filter_map(|line| line.trim_end().strip_prefix("boot "))
        .map(str::to_owned)
        .collect();
    assert_eq!(boots, ["0", "1", "2"], "a machine that starts again has its device again: {printed:#?}");
    assert!(printed.part("restarts").contains("status 0"), "{printed:#?}");
    assert!(printed.part("back").contains("0000:01:00.0 nvme\nstatus 0"), "{printed:#?}");
}
