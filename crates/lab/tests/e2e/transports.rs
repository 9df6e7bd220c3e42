// SPDX-License-Identifier: Apache-2.0
//! A stock Debian whose virtio devices are no PCI functions: it finds them by the ACPI tables alone, and all of them work.

use serde_json::Value;

use crate::lab::{Printed, script};

/// Exits of all vCPUs to the monitor for the party `device`, from the ledger that the script printed as its part `name`.
fn exits(printed: &Printed, name: &str, device: &str) -> u64 {
    let ledger: Value = serde_json::from_str(printed.part(name).trim()).expect("the ledger is JSON");
    let vcpus = ledger["vcpus"].as_array().expect("vcpus");
    let rows = vcpus.iter().flat_map(|vcpu| vcpu["exits"].as_array().expect("rows"));
    rows.filter(|row| row["device"] == device).map(|row| row["count"].as_u64().expect("a number")).sum()
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn every_device_works_through_registers_and_there_is_no_pci_bus() {
    let printed = every_device_works("--mmio-status trap");
    assert!(reads(&printed, "ledger") > 0, "{printed:#?}");
}

/// The same with the registers in read-only pages: a stock kernel then leaves for no read of them.
#[test]
#[ignore = "needs the lab: make e2e"]
fn every_device_works_through_registers_in_pages_and_none_is_read_by_an_exit() {
    let printed = every_device_works("--mmio-status ro-page");
    assert_eq!(reads(&printed, "ledger"), 0, "{printed:#?}");
}

/// The same on pins of KVM's I/O APIC.
#[test]
#[ignore = "needs the lab: make e2e"]
fn every_device_works_on_pins_of_kvms_controller() {
    every_device_works("--irqchip kernel");
}

/// Exits to read registers of devices.
fn reads(printed: &Printed, name: &str) -> u64 {
    let ledger: Value = serde_json::from_str(printed.part(name).trim()).expect("the ledger is JSON");
    let vcpus = ledger["vcpus"].as_array().expect("vcpus");
    let rows = vcpus.iter().flat_map(|vcpu| vcpu["exits"].as_array().expect("rows"));
    let reads = rows.filter(|row| row["device"] == "virtio-mmio" && row["reason"] == "mmio-read");
    reads.map(|row| row["count"].as_u64().expect("a number")).sum()
}

/// A stock guest with one of each device behind registers, with these flags.
fn every_device_works(flags: &str) -> Printed {
    let body = r#"
mkdir -p /lab/stock
mount -o loop,ro /lab/root.ext4 /lab/stock
# shellcheck disable=SC2046
pack_initrd /lab/mmio.img $(modprobe -d /lab/stock -S "$(uname -r)" --show-depends -a \
    virtio_mmio virtio_blk virtio_console virtio_rng virtio_net | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
umount /lab/stock
ip tuntap add tap0 mode tap vnet_hdr
ip addr add 10.0.7.1/24 dev tap0
ip link set tap0 up
head -c 8000000 /dev/urandom >/lab/second.raw
cp /lab/second.raw /lab/second.copy
echo "== guest"
timeout -k 5 200 tare run --kernel /lab/vmlinuz --initrd /lab/mmio.img --memory 256M --cpus 2 --transport mmio \
    --disk path=/lab/root.ext4,readonly=on --disk path=/lab/second.raw,queues=2 --net tap,tap=tap0 --ledger /lab/ledger.json \
    --cmdline "console=tty0 console=hvc0 quiet panic=-1 -- -c \"$ROOT_RO;\
grep PRETTY /mnt/etc/os-release;echo functions \$(ls /sys/bus/pci/devices 2>/dev/null | wc -l);\
for d in /sys/bus/virtio/devices/*;do echo \$(cat \$d/device) by \$(basename \$(readlink -f \$d/..));done;\
echo sum \$(md5sum </dev/vdb);tr a-z b-za </dev/vdb >/tmp.raw;dd if=/tmp.raw of=/dev/vdb bs=64k conv=fsync 2>/dev/null;\
echo random \$(dd if=/dev/hwrng bs=32 count=8 2>/dev/null | wc -c);\
ip addr add 10.0.7.2/24 dev eth0;ip link set eth0 up;ping -c 3 10.0.7.1 | grep received;$OFF\"" </dev/null
echo "status $?"
echo "== sums"
# shellcheck disable=SC2046
echo sum $(md5sum </lab/second.copy)
tr a-z b-za </lab/second.copy >/lab/expected
cmp /lab/expected /lab/second.raw && echo written
echo "== ledger"
cat /lab/ledger.json; echo
"#;
    let printed = script(&body.replace("--transport mmio", &format!("--transport mmio {flags}")), &[]);
    let part = printed.part("guest");
    let lines = ["PRETTY_NAME=\"Debian GNU/Linux 12", "functions 0", "random 256", "3 packets received", "status 0"];
    // Virtio's ids of console, two disks, NIC and entropy, in the order in which they were made.
    let found = ["0x0003 by LNRO0005:00", "0x0002 by LNRO0005:01", "0x0002 by LNRO0005:02", "0x0001 by LNRO0005:03"];
    for line in lines.iter().chain(&found).chain(&["0x0004 by LNRO0005:04"]) {
        assert!(part.contains(line), "'{line}' is not in {printed:#?}");
    }
    let sums = printed.part("sums");
    let sum = sums.lines().next().expect("a sum");
    assert!(part.contains(sum) && sums.contains("written\n"), "the second disk was read and written: {printed:#?}");
    assert!(exits(&printed, "ledger", "virtio-mmio") > 0, "{printed:#?}");
    assert_eq!(exits(&printed, "ledger", "pci-ecam") + exits(&printed, "ledger", "pci-bar"), 0, "{printed:#?}");
    printed
}

/// The stock initrd has to find the module by the device's ACPI id, as any Debian would.
#[test]
#[ignore = "needs the lab: make e2e"]
fn a_stock_debian_finds_its_root_by_the_acpi_tables() {
    let printed = script(
        r#"
echo "== guest"
timeout -k 5 400 tare run --kernel /lab/vmlinuz --initrd /lab/initrd.img --disk path=/lab/root.ext4 --memory 512M \
    --transport mmio --ledger /lab/mmio.json --console serial --cmdline "console=ttyS0 quiet root=/dev/vda rw \
systemd.run=\"/bin/sh -c '(echo up by \$(readlink -f /sys/block/vda/device/..)) >/dev/console'\"" </dev/null
echo "status $?"
echo "== ledger"
cat /lab/mmio.json; echo
"#,
        &[],
    );
    let part = printed.part("guest");
    assert!(part.contains("up by /sys/devices/") && part.contains("LNRO0005:00"), "{printed:#?}");
    assert!(part.contains("status 0"), "{printed:#?}");
    assert!(exits(&printed, "ledger", "virtio-mmio") > 0 && exits(&printed, "ledger", "pci-ecam") == 0, "{printed:#?}");
}
