// SPDX-License-Identifier: Apache-2.0
//! The doctor on made-up hosts: what it says about each, and that text and JSON say the same.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io;
use std::path::Path;

use kvm::KvmError;
use kvm::probe::RingZero;

use super::*;

/// A host of these files.
fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let host = Host(dir.path().to_owned());
    (dir, host)
}

fn find<'a>(findings: &'a [Finding], key: &str) -> &'a Finding {
    findings.iter().find(|f| f.key == key).unwrap()
}

#[test]
fn an_interpreted_kvm_is_missing_hardware() {
    let of = |instruction_ns| virt::hardware_of(Ok(RingZero { instruction_ns, exit_ns: 9000.0 }));
    assert_eq!(of(0.3).state, State::Ok);
    assert_eq!(of(9.0).state, State::Ok, "a software processor that translates code still counts");
    let slow = of(1401.0);
    assert_eq!(slow.state, State::Missing);
    assert_eq!(slow.value["hardware"], false);
    assert!(slow.said.starts_with("no, guest kernels are interpreted: 1401.00 ns"), "{}", slow.said);
    let stuck = virt::hardware_of(Err(KvmError::Call { call: "KVM_RUN", source: io::ErrorKind::TimedOut.into() }));
    assert_eq!(stuck.state, State::Missing);
}

#[test]
fn no_kvm_is_one_finding_with_what_to_do() {
    let findings = virt::look(Path::new("/nonexistent/kvm"));
    assert_eq!(findings.len(), 1);
    assert_eq!(findings[0].state, State::Missing);
    assert_eq!(findings[0].said, "/nonexistent/kvm: No such file or directory");
    assert!(findings[0].get.unwrap().contains("modprobe"));
    assert!(!is_ready(&findings));
}

#[test]
fn cpu_features_are_a_list_for_people_and_programs() {
    let found = virt::cpu_features_of(&["sse2", "avx2"]);
    assert_eq!((found.state, found.key), (State::Ok, "kvm.cpu_features"));
    assert_eq!(found.said, "2 for --cpu: sse2 avx2");
    assert_eq!(found.value, serde_json::json!(["sse2", "avx2"]));
}

#[test]
fn capabilities_have_costs() {
    assert_eq!(virt::capability_of("irqfd", 1).state, State::Ok);
    assert_eq!(virt::capability_of("irqfd", 0).state, State::Missing);
    let coalesced = virt::capability_of("coalesced_pio", 0);
    assert_eq!((coalesced.state, coalesced.key), (State::Lacking, "kvm.cap.coalesced_pio"));
    assert_eq!(coalesced.cost, Some("each character on the serial console is an exit"));
    assert_eq!(virt::capability_of("max_vcpus", 1024).said, "1024");
}

#[test]
fn a_rich_host_lacks_nothing() {
    let (_dir, host) = host(&[
        ("proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nSwapTotal: 0 kB\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        (
            "proc/self/limits",
            "Max locked memory         unlimited            unlimited            bytes\nMax open files            1048576 1048576 files\n",
        ),
        ("sys/kernel/iommu_groups/0/type", "DMA\n"),
        ("sys/kernel/iommu_groups/1/type", "DMA\n"),
        ("dev/vfio/vfio", ""),
        ("dev/net/tun", ""),
        ("dev/vhost-net", ""),
        ("dev/vhost-vsock", ""),
        ("proc/self/status", "Name:\ttare\nCapEff:\t0000000000001000\n"),
    ]);
    let mut findings = memory::look(&host);
    findings.extend(devices::look(&host).into_iter().filter(|f| f.key != "io_uring"));
    assert!(findings.iter().all(|f| f.state == State::Ok && f.cost.is_none()), "{findings:#?}");
    assert_eq!(find(&findings, "memory.host").said, "2G of RAM, 1G available, 0 of swap");
    assert_eq!(find(&findings, "memory.thp").value["mode"], "always");
    assert_eq!(find(&findings, "memory.hugetlb").value["2M"], serde_json::json!({"total": 8, "free": 3}));
    assert_eq!(find(&findings, "iommu").value["groups"], 2);
}

#[test]
fn a_poor_host_says_what_each_lack_costs() {
    let (_dir, host) = host(&[
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        (
            "proc/self/limits",
            "Max locked memory         8388608              8388608              bytes\nMax open files            256 4096 files\n",
        ),
        ("proc/sys/kernel/io_uring_disabled", "2\n"),
    ]);
    let mut findings = memory::look(&host);
    findings.extend(devices::look(&host).into_iter().filter(|f| f.key != "io_uring"));
    findings.push(devices::uring_of(&host, Err(io::Error::from_raw_os_error(libc::EPERM))));
    for key in
        ["memory.thp", "memory.hugetlb", "limits.memlock", "limits.nofile", "iommu", "net.tun", "vhost.net", "io_uring"]
    {
        let finding = find(&findings, key);
        assert_eq!(finding.state, State::Lacking, "{key}");
        assert!(finding.cost.is_some() && finding.get.is_some(), "{key}");
    }
    assert_eq!(find(&findings, "io_uring").get, Some("sysctl kernel.io_uring_disabled=0"));
    assert_eq!(find(&findings, "limits.memlock").said, "8M may be locked");
    assert!(is_ready(&findings), "guests still run");
}

#[test]
fn text_and_json_hold_the_same() {
    let (_dir, host) = host(&[]);
    let mut findings = memory::look(&host);
    findings.extend(devices::look(&host));
    findings.extend(virt::look(Path::new("/nonexistent/kvm")));
    findings.extend([virt::capability_of("irqfd", 1), virt::capability_of("memory_slots", 509)]);
    let text = table(&findings);
    assert!(text.lines().all(|l| l.len() <= WIDTH), "{text}");
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("ok kvm.cap irqfd, memory_slots=509 "), "{text}");
    let parsed: Value = serde_json::from_str(&json(&findings)).unwrap();
    assert_eq!(parsed["ready"], false);
    assert_eq!(parsed["findings"].as_object().unwrap().len(), findings.len(), "keys are unique");
    for finding in &findings {
        let key = finding.key.trim_start_matches("kvm.cap.");
        assert!(flat.contains(key) && (finding.said == "yes" || flat.contains(&finding.said)), "{key}");
        assert_eq!(parsed["findings"][finding.key]["said"], finding.said.as_str());
        for line in finding.cost.iter().chain(&finding.get) {
            assert!(flat.contains(line), "{line}");
        }
    }
}
