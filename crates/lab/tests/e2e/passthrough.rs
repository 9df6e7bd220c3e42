// SPDX-License-Identifier: Apache-2.0
//! Devices of the host in a real guest: an NVMe disk and a network card go from the lab machine's drivers to a guest and come
//! back, and what can't be handed on is refused with a line that helps.

use crate::lab::{Place, script, script_in};

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
in_stock_root work "$VERIFY_DISK"'
grep -c "err= 0" /tmp/fio
echo "inside $(dd if=/dev/nvme0n1 bs=1M skip=512 count=4 iflag=direct 2>/dev/null | sha256sum)"
'"$FILL_WIRE"
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

/// Groups that two drivers share, and limits that are met on the way: one line each, and everything as it was.
#[test]
#[ignore = "needs the lab: make e2e"]
fn what_stands_in_the_way_is_named_and_nothing_stays_half_bound() {
    let printed = script_in(
        Place::Passthrough,
        r#"
passthrough_devices
SHARED=0000:04:00.1
until [ -e /sys/bus/pci/devices/$SHARED ]; do sleep 0.2; done
# Its neighbour gets the driver of virtio devices with this.
kept_card 10.9.0.1/24
until [ -e /sys/bus/pci/devices/0000:04:00.0/driver ]; do sleep 0.2; done
group() { basename "$(readlink /sys/bus/pci/devices/$1/iommu_group)"; }
echo "== shared"
tare passthrough bind $SHARED
tare passthrough list | grep -E "$SHARED"
refused --kernel /lab/vmlinuz --vfio $SHARED
tare passthrough bind 0000:04:00.0
tare passthrough list | grep -E "$SHARED"
tare passthrough unbind 0000:04:00.0
tare passthrough unbind $SHARED
echo "== memlock"
tare passthrough bind $CARD
chmod 666 /dev/vfio/vfio "/dev/vfio/$(group $CARD)" /dev/kvm
prlimit --memlock=$((100 << 20)) --core=0 setpriv --reuid 1000 --regid 1000 --clear-groups \
    timeout 60 tare run --kernel /lab/vmlinuz --memory 256M --vfio $CARD </dev/null 2>&1
echo "status $?"
tare passthrough list | grep -E "$CARD"
echo "== cgroup"
mkdir /sys/fs/cgroup/small
echo +memory >/sys/fs/cgroup/cgroup.subtree_control 2>/dev/null
echo 200M >/sys/fs/cgroup/small/memory.max
for prealloc in off parallel; do
    (
        echo 0 >/sys/fs/cgroup/small/cgroup.procs
        refused --kernel /lab/vmlinuz --memory 512M,prealloc=$prealloc --vfio $CARD
    )
done
tare passthrough list | grep -E "$CARD"
echo "== too few pages"
refused --kernel /lab/vmlinuz --memory 512M,pages=2M,prealloc=parallel --vfio $CARD
echo "== goes on"
guest "echo up;$OFF" --vfio $CARD 2>&1
tare passthrough unbind $CARD
tare passthrough list | grep -E "$CARD"
"#,
        &[],
    );
    let lines = |part: &str| printed.part(part).lines().map(str::trim_end).collect::<Vec<_>>();
    let shared = lines("shared");
    let [bound, more, listed, refused, status, ..] = shared[..] else { panic!("{printed:#?}") };
    assert_eq!(bound, "0000:04:00.1 vfio-pci (had no driver)", "{printed:#?}");
    assert!(more.contains("its group has 0000:04:00.0 (virtio-pci) too"), "{printed:#?}");
    assert!(listed.contains("shares its group with 0000:04:00.0 (virtio-pci)"), "{printed:#?}");
    assert!(refused.starts_with("tare: 0000:04:00.1 can't leave the host alone, group "), "{printed:#?}");
    assert!(refused.contains("has 0000:04:00.0 (virtio-pci) too: --vfio; hand those over"), "{printed:#?}");
    assert_eq!(status, "status 2", "{printed:#?}");
    // Both are the guest's to have, and go back.
    assert!(shared[6].ends_with("nothing: ready"), "{printed:#?}");
    assert_eq!(shared[7..], ["0000:04:00.0 virtio-pci", "0000:04:00.1 no driver"], "{printed:#?}");
    let memlock = lines("memlock");
    assert!(memlock[1].starts_with("tare: guest memory can't be pinned for devices after the first "), "{printed:#?}");
    assert!(memlock[1].contains(": --vfio; ") && memlock[1].contains("ulimit -l"), "{printed:#?}");
    assert!(memlock[2].starts_with("status ") && memlock[2] != "status 0", "{printed:#?}");
    let cgroup = lines("cgroup");
    for (at, place) in [(0, ": --vfio; "), (2, ": --memory prealloc; ")] {
        let said = cgroup[at];
        assert!(said.contains(place), "{printed:#?}");
        assert!(
            said.starts_with("tare: 512 MiB of guest memory can't be made ready, this cgroup may have "),
            "{printed:#?}"
        );
        assert!(said.contains("raise /sys/fs/cgroup/small/memory.max"), "{printed:#?}");
    }
    for part in ["memlock", "cgroup"] {
        assert!(lines(part).last().is_some_and(|line| line.ends_with("nothing: ready")), "{part}: {printed:#?}");
    }
    assert!(lines("too few pages")[0].contains("pages"), "{printed:#?}");
    let after = lines("goes on");
    assert!(after.contains(&"up") && after.contains(&"status 0"), "{printed:#?}");
    assert!(after.last().is_some_and(|line| line.ends_with("bind it")), "{printed:#?}");
}

/// A host whose IOMMU is off.
#[test]
#[ignore = "needs the lab: make e2e"]
fn a_host_without_an_iommu_says_so() {
    let printed = script(
        r#"
IDE=0000:00:01.1
echo "== run"; refused --kernel /lab/vmlinuz --vfio $IDE
echo "== bind"; before=$(readlink /sys/bus/pci/devices/$IDE/driver); tare passthrough bind $IDE 2>&1; echo "status $?"
[ "$before" = "$(readlink /sys/bus/pci/devices/$IDE/driver)" ] && echo as it was
tare passthrough list | grep $IDE
"#,
        &[],
    );
    let why = "tare: 0000:00:01.1 is in no IOMMU group: --vfio; switch the IOMMU on (VT-d or AMD-Vi in the firmware, and \
               intel_iommu=on on the command line of this host's kernel)\nstatus 2\n";
    assert_eq!(printed.part("run"), why);
    let bind = printed.part("bind");
    assert!(bind.starts_with(why) && bind.contains("as it was") && bind.contains("no IOMMU"), "{printed:#?}");
}
