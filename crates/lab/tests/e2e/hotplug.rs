// SPDX-License-Identifier: Apache-2.0
//! Devices of the host that come and go while a real guest runs, and devices that a guest drives by their interrupt pin.

use crate::lab::{Place, script_in};

/// An NVMe disk is added to a stock kernel, verified, removed, used by the host, and added again.
#[test]
#[ignore = "needs the lab: make e2e"]
fn an_nvme_disk_is_added_verified_removed_and_added_again() {
    let printed = script_in(
        Place::Passthrough,
        r#"
passthrough_devices
tare passthrough bind $NVME
ctl() { tare ctl --api /lab/socket "$@" 2>&1; echo "status $?"; }
says() { for _ in $(seq 500); do grep -q "^$1" /lab/out && return; sleep 0.2; done; }
SUM='sum() { dd if=/dev/nvme0n1 bs=1M skip=512 count=4 iflag=direct 2>/dev/null|sha256sum; }'
THERE='there() { until [ -b /dev/nvme0n1 ];do sleep 0.1;done; }'
FIRST='[ -b /dev/nvme0n1 ] && echo too early;echo empty;there;head -c 4194304 /dev/urandom >/data;echo made $(sha256sum </data)'
USE='dd if=/data of=/dev/nvme0n1 bs=1M seek=512 oflag=direct 2>/dev/null;echo inside $(sum);echo used'
LEAVE='while [ -b /dev/nvme0n1 ];do sleep 0.1;done;sleep 1;echo left $(ls /sys/bus/pci/drivers/nvme|grep -c 0000:);echo gone'
LIMIT=400 guest "$SUM;$THERE;$FIRST;$USE;$LEAVE;there;echo again \$(sum);$OFF" --api /lab/socket >/lab/out 2>&1 &
says empty
echo "== refused"
ctl remove-device --vfio $NVME
ctl add-device --vfio $CARD
ctl add-device --vfio 0000:7f:00.0
echo "== added"
ctl add-device --vfio $NVME
echo "== twice"
ctl add-device --vfio $NVME
echo "== listed"
ctl info | tr -d ' \n'
says used
echo "== removed"
ctl remove-device --vfio $NVME --timeout 60
says gone
PID=$(pidof tare)
echo "open $(ls -l /proc/$PID/fd | grep -c vfio/) mapped $(grep -c vfio /proc/$PID/maps) pinned $(awk '/VmLck/ { print $2 }' /proc/$PID/status)"
tare passthrough unbind $NVME
for _ in $(seq 100); do [ -b /dev/nvme0n1 ] && break; sleep 0.2; done
echo "host $(dd if=/dev/nvme0n1 bs=1M skip=512 count=4 iflag=direct 2>/dev/null | sha256sum)"
echo "== unbound"
ctl add-device --vfio $NVME
echo "== back"
tare passthrough bind $NVME
ctl add-device --vfio $NVME
wait
echo "== guest"
cat /lab/out
"#,
        &[],
    );
    let sum = |part: &str, name: &str| {
        let line = printed.part(part).lines().find_map(|line| line.trim_end().strip_prefix(name).map(str::to_owned));
        let line = line.unwrap_or_else(|| panic!("no line '{name}' in {printed:#?}"));
        line.split_ascii_whitespace().next().unwrap_or_default().to_owned()
    };
    let refused = printed.part("refused");
    assert!(
        refused.contains("the machine has no device 0000:01:00.0: --vfio; of the host it has none"),
        "{printed:#?}"
    );
    assert!(refused.contains("0000:02:00.0 belongs to no driver, not to vfio-pci"), "{printed:#?}");
    assert!(refused.contains("this host has no PCI device 0000:7f:00.0"), "{printed:#?}");
    assert_eq!(refused.matches("status 2").count(), 3, "{printed:#?}");
    assert_eq!(printed.part("added"), "status 0\n");
    let twice = printed.part("twice");
    assert!(twice.contains("can't be added: --vfio; the machine has it already\nstatus 2"), "{printed:#?}");
    assert!(printed.part("listed").contains(r#""vfio":["0000:01:00.0"]"#), "{printed:#?}");
    let removed = printed.part("removed");
    assert!(removed.starts_with("status 0\n"), "{printed:#?}");
    assert!(removed.contains("open 0 mapped 0 pinned 0\n") && removed.contains("0000:01:00.0 nvme\n"), "{printed:#?}");
    assert!(printed.part("unbound").contains("belongs to nvme, not to vfio-pci"), "{printed:#?}");
    assert_eq!(printed.part("back"), "0000:01:00.0 vfio-pci (was nvme)\nstatus 0\n");
    let guest = printed.part("guest");
    assert!(guest.contains("left 0") && !guest.contains("too early") && guest.contains("status 0"), "{printed:#?}");
    let made = sum("guest", "made ");
    assert!(made.len() == 64, "{printed:#?}");
    let seen = [sum("guest", "inside "), sum("removed", "host "), sum("guest", "again ")];
    assert!(seen.iter().all(|other| *other == made), "{printed:#?}");
}

/// A guest that takes no part keeps its device until it is taken away.
#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_that_hears_nothing_keeps_its_device_until_force_takes_it() {
    let printed = script_in(
        Place::Passthrough,
        r#"
passthrough_devices
tare passthrough bind $NVME
ctl() { tare ctl --api /lab/socket "$@" 2>&1; echo "status $?"; }
says() { for _ in $(seq 500); do grep -q "^$1" /lab/out && return; sleep 0.2; done; }
MORE=acpiphp.disable=1 guest 'until [ -b /dev/nvme0n1 ];do sleep 0.1;done;echo found;sleep 100' --api /lab/socket \
    --vfio $NVME >/lab/out 2>&1 &
says found
echo "== deaf"
ctl remove-device --vfio $NVME --timeout 1
ctl remove-device --vfio $NVME --timeout 1 --force
ctl info | grep -c 01:00.0
tare passthrough unbind $NVME
kill -9 $(pidof tare)
wait
echo "== said"
cat /lab/out
"#,
        &[],
    );
    let deaf = printed.part("deaf");
    assert!(deaf.contains("is still the guest's: --vfio; the guest did not let go of it in 1 s"), "{printed:#?}");
    assert!(deaf.ends_with("status 2\nstatus 0\n0\n0000:01:00.0 nvme\n"), "{printed:#?}");
    assert!(printed.part("said").contains("device 0000:01:00.0: taken away, the guest did not let go"), "{printed:#?}");
}

/// The stock driver without messages: the disk's pin, through tare's own I/O APIC and through KVM's. The console is a serial
/// port: virtio's devices have no pins.
#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_without_messages_reads_and_writes_an_nvme_disk_by_its_pin() {
    let printed = script_in(
        Place::Passthrough,
        r#"
passthrough_devices
tare passthrough bind $NVME
for chip in split kernel; do
echo "== $chip"
MORE='pci=nomsi console=ttyS0' guest 'head -c 2097152 /dev/urandom >/data;sha256sum </data;dd if=/data of=/dev/nvme0n1 bs=64k oflag=direct 2>/dev/null;dd if=/dev/nvme0n1 bs=4k count=512 iflag=direct 2>/dev/null|sha256sum;grep nvme /proc/interrupts;echo o >/proc/sysrq-trigger;sleep 60' \
    --irqchip $chip --console serial --vfio $NVME
done
"#,
        &[],
    );
    for chip in ["split", "kernel"] {
        let part = printed.part(chip);
        assert!(part.contains("status 0"), "{printed:#?}");
        let sums: Vec<_> = part.lines().filter(|line| line.trim_end().ends_with('-') && line.len() > 60).collect();
        assert!(sums.len() == 2 && sums[0] == sums[1], "{printed:#?}");
        let line = part.lines().find(|line| line.contains("nvme0q")).unwrap_or_default();
        let count: u64 = line.split_ascii_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        assert!(line.contains("IO-APIC") && line.contains("fasteoi") && count >= 500, "{printed:#?}");
    }
}
