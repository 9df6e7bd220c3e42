// SPDX-License-Identifier: Apache-2.0
//! The paravirtual interrupt controller under a stock kernel with `guests/vioapic-linux`: disks and a NIC on its lines, in
//! each mode, while their interrupts move, a CPU goes and comes back, and the machine sleeps.

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;

use crate::lab::{Printed, script, tare_lab};

/// An initrd, the module in it (its flow is a word of the command line: init has it in its environment), and what the guest does.
const GUEST: &str = r#"
mkdir -p /lab/stock
mount -o loop,ro /lab/root.ext4 /lab/stock
# shellcheck disable=SC2046
pack_initrd /lab/mmio.img $(modprobe -d /lab/stock -S "$(uname -r)" --show-depends -a \
    virtio_mmio virtio_blk virtio_console virtio_net | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
umount /lab/stock
mkdir -p /lab/extra
cp /lab/vioapic.ko /lab/extra
cat >/lab/extra/load.sh <<'END'
insmod /vioapic.ko flow=$flow
mount -t ext4 -o ro /dev/vda /mnt
grep PRETTY /mnt/etc/os-release
dmesg | sed -n 's/.*vioapic TARE0001:00: //p' | tail -1
lines() { sed -n 's/^ *\([0-9]*\):.* vioapic .*/\1/p' /proc/interrupts; }
move() { for line in $(lines); do echo $1 >/proc/irq/$line/smp_affinity || echo line $line does not move; done; }
where() { for line in $(lines); do cat /proc/irq/$line/effective_affinity; done | sort -u | tr '\n' ' '; }
copy() { dd if=/dev/vdb of=/same.$1 bs=8k iflag=direct 2>/dev/null && echo $1 $(md5sum </same.$1); rm /same.$1; }
ip addr add 10.0.7.2/24 dev eth0
ip link set eth0 up
echo $(lines | wc -l) lines
copy first
(ping -q -i 0.05 -c 40 10.0.7.1 | grep received) &
(for n in 1 2 3; do dd if=/dev/vdb of=/dev/null bs=8k iflag=direct 2>/dev/null; done; echo loaded) &
for n in 1 2 3 4 5 6 7 8; do move 1; move 2; sleep 0.1; done
echo moved to $(where)
echo 0 >/sys/devices/system/cpu/cpu1/online
echo without CPU 1 $(where)
copy second
echo 1 >/sys/devices/system/cpu/cpu1/online
move 2
echo again on $(where)
copy third
wait
tr a-z b-za </dev/vdb >/tmp.raw
dd if=/tmp.raw of=/dev/vdb bs=8k oflag=direct conv=fsync 2>/dev/null
rm /tmp.raw
# Without swap there is nowhere to write the image to: everything sleeps, the image is made, everything goes on.
echo disk >/sys/power/state 2>/dev/null
dmesg | grep -q 'hibernation: Creating image' && echo slept
copy fourth
ping -q -c 2 10.0.7.1 | grep received
ip link set eth0 down
umount /mnt
rmmod virtio_net virtio_blk
sleep 0.1
total=0
for line in $(ls /sys/kernel/irq); do
    [ "$(cat /sys/kernel/irq/$line/chip_name)" = vioapic ] || continue
    for count in $(tr , ' ' </sys/kernel/irq/$line/per_cpu_count); do total=$((total + count)); done
done
echo the guest took $total
rmmod vioapic && echo unloaded
dmesg | grep -i -e 'nobody cared' -e 'no irq handler' -e 'warning' -e 'bug:'
echo o >/proc/sysrq-trigger
sleep 60
END
(cd /lab/extra && find . | busybox cpio -o -H newc 2>/dev/null) >>/lab/mmio.img
ip tuntap add tap0 mode tap vnet_hdr
ip addr add 10.0.7.1/24 dev tap0
ip link set tap0 up
head -c 2097152 /dev/urandom >/lab/first.raw
tr a-z b-za </lab/first.raw >/lab/expected
echo "== sums"
echo "before $(md5sum </lab/first.raw)"
echo "after $(md5sum </lab/expected)"
run() {
    cp /lab/first.raw /lab/second.raw
    echo "== $1 $2"
    timeout -k 5 200 tare run --kernel /lab/vmlinuz --initrd /lab/mmio.img --memory 256M --cpus 2 --transport mmio --vioapic $1 \
        --disk path=/lab/root.ext4,readonly=on --disk path=/lab/second.raw --net tap,tap=tap0 --ledger /lab/ledger.json \
        --cmdline "console=tty0 console=hvc0 panic=-1 loglevel=3 flow=$2 -- /load.sh" </dev/null
    echo "status $?"
    cmp /lab/expected /lab/second.raw && echo written
    echo "== ledger $1 $2"
    cat /lab/ledger.json; echo
}
"#;

/// The module, built for the guests' kernel.
fn module() -> PathBuf {
    let built = tare_lab(&["host", "module"]).stderr(Stdio::inherit()).output().expect("tare-lab starts");
    assert!(built.status.success(), "the module can't be built");
    PathBuf::from(String::from_utf8_lossy(&built.stdout).trim())
}

/// Runs the guest in each of `modes` with the flow beside it, and looks at what it said and at what the monitor counted.
fn runs(modes: &[(&str, &str)]) {
    let calls: String = modes.iter().map(|(mode, flow)| format!("run {mode} {flow}\n")).collect();
    let printed = script(&format!("{GUEST}{calls}"), &[(module(), "/lab/vioapic.ko")]);
    for (mode, flow) in modes {
        check(&printed, mode, flow);
    }
}

fn check(printed: &Printed, mode: &str, flow: &str) {
    let part = printed.part(&format!("{mode} {flow}"));
    let sum = |when: &str| {
        let sums = printed.part("sums").lines().find_map(|line| line.strip_prefix(when));
        sums.expect("a sum").split_whitespace().next().expect("a sum").to_owned()
    };
    for line in [
        "PRETTY_NAME=\"Debian GNU/Linux 12",
        &format!("mode {mode}, flow {flow}\n"),
        "3 lines\n",
        &format!("first {}", sum("before")),
        "moved to ",
        "without CPU 1 1\n",
        "again on 2\n",
        &format!("second {}", sum("before")),
        &format!("third {}", sum("before")),
        "40 packets received",
        "loaded\n",
        "slept\n",
        &format!("fourth {}", sum("after")),
        "2 packets received",
        "unloaded\n",
        "status 0\n",
        "written\n",
    ] {
        assert!(part.contains(line), "'{line}' is not in {part}");
    }
    for trouble in ["does not move", "nobody cared", "WARNING", "BUG:", "No irq handler"] {
        assert!(!part.contains(trouble), "{part}");
    }
    let ledger = printed.part(&format!("ledger {mode} {flow}"));
    let ledger: Value = serde_json::from_str(ledger.trim()).expect("the ledger is JSON");
    let device = ledger["devices"].as_array().expect("devices").iter().find(|d| d["name"] == "vioapic");
    let sent = device.expect("the controller has its line")["interrupts"].as_u64().expect("a number");
    let took = part.lines().find_map(|line| line.strip_prefix("the guest took ")).expect("a count");
    assert_eq!(
        took.trim().parse(),
        Ok(sent),
        "interrupts that the guest took, and that were sent, {mode} {flow}: {part}"
    );
    assert!(sent > 1500, "{sent} interrupts were hardly a load");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_stock_debian_has_its_disks_and_net_on_paravirtual_lines() {
    runs(&[("pv", "fasteoi"), ("trap", "level"), ("ro-page", "fasteoi")]);
}
