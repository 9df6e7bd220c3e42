// SPDX-License-Identifier: Apache-2.0
//! Memory's part of `tare doctor`: how much there is, transparent huge pages, hugetlb pools, limits on locking.

use serde_json::{Map, Value, json};
use spec::show_size;

use super::{Finding, Host};

/// Looks at `host`.
pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = vec![amount(host), transparent(host), pools(host)];
    findings.extend(limits(host));
    findings
}

/// The value of a line of `/proc/meminfo` in bytes.
fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    let mut words = line.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    number.checked_mul(if words.next() == Some("kB") { 1024 } else { 1 })
}

fn amount(host: &Host) -> Finding {
    let meminfo = host.read("proc/meminfo").unwrap_or_default();
    let bytes = |key| meminfo_bytes(&meminfo, key).unwrap_or(0);
    let (total, available, swap) = (bytes("MemTotal"), bytes("MemAvailable"), bytes("SwapTotal"));
    let mib = |bytes: u64| show_size(bytes >> 20 << 20);
    let said = format!("{} of RAM, {} available, {} of swap", mib(total), mib(available), mib(swap));
    Finding::ok("memory.host", json!({"total": total, "available": available, "swap": swap}), said)
}

/// The word in brackets of a file like `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word)
}

fn transparent(host: &Host) -> Finding {
    let read = |name| host.read(&format!("sys/kernel/mm/transparent_hugepage/{name}"));
    let mode = read("enabled").as_deref().and_then(chosen).unwrap_or("absent").to_owned();
    let shmem = read("shmem_enabled").as_deref().and_then(chosen).unwrap_or("absent").to_owned();
    let defrag = read("defrag").as_deref().and_then(chosen).unwrap_or("absent").to_owned();
    let said = format!("{mode} (shared memory {shmem}, defrag {defrag})");
    let value = json!({"mode": mode, "shmem": shmem, "defrag": defrag});
    let found = Finding::ok("memory.thp", value, said);
    match mode.as_str() {
        "always" | "madvise" => found,
        _ => found.lacking(
            "guest memory comes in 4 KiB pages: more page faults, more TLB misses",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

fn pools(host: &Host) -> Finding {
    let mut value = Map::new();
    let mut parts = Vec::new();
    let mut total = 0;
    for folder in host.list("sys/kernel/mm/hugepages") {
        let size = folder.strip_prefix("hugepages-").and_then(|s| s.strip_suffix("kB")).and_then(|s| s.parse().ok());
        let Some(kib) = size.filter(|kib: &u64| *kib < 1 << 40) else { continue };
        let read = |name| host.number(&format!("sys/kernel/mm/hugepages/{folder}/{name}")).unwrap_or(0);
        let (all, free) = (read("nr_hugepages"), read("free_hugepages"));
        total += all;
        let name = show_size(kib << 10);
        parts.push(format!("{free} of {all} pages of {name} free"));
        value.insert(name, json!({"total": all, "free": free}));
    }
    let said = if parts.is_empty() { "none".to_owned() } else { parts.join(", ") };
    let found = Finding::ok("memory.hugetlb", Value::Object(value), said);
    if total > 0 {
        found
    } else {
        found.lacking(
            "no guaranteed huge pages: large guests, those with passed-through devices above all, start slower",
            "echo COUNT > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages, or hugepagesz=1G hugepages=COUNT at boot",
        )
    }
}

/// Soft and hard limit of a line of `/proc/self/limits`; `None` inside is unlimited.
fn limit(limits: &str, name: &str) -> Option<(Option<u64>, Option<u64>)> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = rest.split_whitespace();
    let mut next = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some((next()?, next()?))
}

fn limits(host: &Host) -> Vec<Finding> {
    /// `CAP_IPC_LOCK`'s bit: its holder is not limited.
    const IPC_LOCK: u32 = 14;
    /// Descriptors that a guest of 64 vCPUs with 24 disks of several queues needs, with room.
    const FILES: u64 = 1024;
    let text = host.read("proc/self/limits").unwrap_or_default();
    let show = |n: Option<u64>| n.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
    let mut findings = Vec::new();
    if let Some((soft, hard)) = limit(&text, "Max locked memory") {
        let said = match soft {
            Some(bytes) => format!("{} may be locked", show_size(bytes)),
            None => "any amount may be locked".to_owned(),
        };
        let found = Finding::ok("limits.memlock", json!({"soft": soft, "hard": hard}), said);
        findings.push(match soft {
            None => found,
            Some(_) if host.may(IPC_LOCK) => found,
            Some(_) => found.lacking(
                "passed-through devices pin all guest memory and are refused above the limit",
                "ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit",
            ),
        });
    }
    if let Some((soft, hard)) = limit(&text, "Max open files") {
        let said = format!("{} open files, at most {}", show(soft), show(hard));
        let found = Finding::ok("limits.nofile", json!({"soft": soft, "hard": hard}), said);
        findings.push(if soft.is_none_or(|n| n >= FILES) {
            found
        } else {
            found.lacking("large guests run out of descriptors", "ulimit -n 4096, or LimitNOFILE= in a unit")
        });
    }
    findings
}
