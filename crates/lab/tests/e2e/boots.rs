// SPDX-License-Identifier: Apache-2.0
//! What a user gets from a run: an unmodified Debian that boots, works and ends, and a ledger that adds up.

use serde_json::Value;

use crate::lab::script;

fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} is no number in {value:#}"))
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_stock_debian_boots_with_its_own_init_runs_sysbench_and_powers_off() {
    let printed = script(
        r#"
echo "== guest"
tare run --kernel /lab/vmlinuz --initrd /lab/initrd.img --disk path=/lab/root.ext4 --cpus 2 --memory 1G --ledger /lab/ledger.json \
    --console serial --cmdline "console=ttyS0 root=/dev/vda rw systemd.run=\"/bin/sh -c '(nproc; grep MemTotal /proc/meminfo; lspci -n; \
sysbench cpu --cpu-max-prime=500 --time=1 --threads=2 run) >/dev/console'\"" </dev/null
echo "status $?"
echo "== ledger"
cat /lab/ledger.json; echo
"#,
        &[],
    );
    printed.shows("status 0\n").shows("events per second:").shows("Welcome to");
    let events = printed.stdout.lines().find_map(|line| line.trim().strip_prefix("total number of events:"));
    let events: u64 = events.unwrap_or_default().trim().parse().unwrap_or(0);
    assert!(events > 0, "sysbench did something: {printed:#?}");

    let ledger: Value = serde_json::from_str(printed.part("ledger").trim()).expect("the ledger is JSON");
    let exits = number(&ledger, "/exits");
    let to_monitor = number(&ledger, "/monitor_exits");
    assert!(0 < to_monitor && to_monitor < exits, "{exits} exits, {to_monitor} to the monitor");
    assert!(number(&ledger, "/interrupts") > 0);
    assert!(number(&ledger, "/setup_ns") < number(&ledger, "/wall_ns"));
    let vcpus = ledger["vcpus"].as_array().expect("vcpus");
    assert_eq!(vcpus.len(), 2);
    for vcpu in vcpus {
        assert!(number(vcpu, "/guest_ns") > 0 && number(vcpu, "/kvm/exits") > 0, "{vcpu:#}");
    }
    let rows: u64 =
        vcpus.iter().flat_map(|v| v["exits"].as_array().expect("rows")).map(|row| number(row, "/count")).sum();
    assert_eq!(rows, to_monitor, "the rows add up to the sum above them");
    let disk = ledger["devices"].as_array().expect("devices").iter().find(|d| d["name"] == "disk0").expect("the disk");
    assert!(number(disk, "/requests") > 100 && number(disk, "/bytes_read") > 10 << 20, "{disk:#}");
    assert!(number(disk, "/kicks") <= number(disk, "/requests"), "{disk:#}");
    let guest = number(&ledger, "/memory/guest_rss");
    assert!((64 << 20..=1 << 30).contains(&guest), "{guest} bytes of guest memory");
    assert!(number(&ledger, "/memory/monitor_rss") > 0);
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn memory_at_the_edges_of_the_hole_and_many_vcpus() {
    let printed = script(
        r#"
for size in 3071M 3072M 3073M 4G; do
    echo "== $size"
    MEMORY=$size guest "grep MemTotal /proc/meminfo;$OFF"
done
echo "== 16 vCPUs"
guest "$ROOT_RO;echo cpus \$(nproc);chroot /mnt lscpu;grep -m1 flags /proc/cpuinfo;$OFF" --cpus 16,sockets=2 --disk path=/lab/root.ext4,readonly=on
echo "== 12 vCPUs"
guest "$ROOT_RO;chroot /mnt lscpu;cd /sys/devices/system/cpu;grep . cpu5/topology/physical_package_id cpu6/topology/physical_package_id;\
grep -m1 flags /proc/cpuinfo;$OFF" \
    --cpus 12,sockets=2,cores=3,threads=2 --cpu host,-avx,-rdrand --cpu-pin 0:0,11:0 --halt-poll 20000 --disk path=/lab/root.ext4,readonly=on
"#,
        &[],
    );
    for (size, mib) in [("3071M", 3071u64), ("3072M", 3072), ("3073M", 3073), ("4G", 4096)] {
        let part = printed.part(size);
        let kib = part.lines().find_map(|l| l.strip_prefix("MemTotal:")).and_then(|l| l.trim().strip_suffix(" kB"));
        let kib: u64 = kib
            .and_then(|kib| kib.trim().parse().ok())
            .unwrap_or_else(|| panic!("no memory size: {part}\n{}", printed.stderr));
        // The kernel keeps some for itself: its image, its page array.
        assert!(kib < mib << 10 && kib > (mib << 10) * 94 / 100, "{kib} KiB of {mib} MiB");
        assert!(part.contains("status 0"), "{part}");
    }
    // The lab's CPU is an AMD one from before there were threads, and a Linux of that time takes them for cores; sockets start
    // where the APIC ids say, which have a gap between the last CPU of one and the first of the next.
    let package = |cpu| format!("cpu{cpu}/topology/physical_package_id:{}", u8::from(cpu > 5));
    for (name, lines) in [
        ("16 vCPUs", vec!["cpus 16", "Socket(s): 2", "Core(s) per socket: 8", "status 0"]),
        ("12 vCPUs", vec!["CPU(s): 12", "Socket(s): 2", "Core(s) per socket: 6", &package(5), &package(6), "status 0"]),
    ] {
        let part = printed.part(name);
        for line in lines {
            let same = |shown: &str| shown.split_whitespace().eq(line.split_whitespace());
            assert!(part.lines().any(same), "'{line}' is not in {part}");
        }
        let flags = part.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
        for kept in ["sse2", "xsave", "x2apic"] {
            assert!(has(kept), "{kept} is not in {flags}");
        }
        for masked in ["avx", "avx2", "fma", "f16c", "rdrand"] {
            assert_eq!(has(masked), name == "16 vCPUs", "{masked} in {flags}");
        }
    }
    assert!(printed.stderr.contains("tare: halt-poll 20000: a vCPU that halts keeps"), "{}", printed.stderr);
}
