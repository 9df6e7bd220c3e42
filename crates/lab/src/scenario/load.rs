// SPDX-License-Identifier: Apache-2.0
//! Suite `irq-load`: workloads whose time is interrupts, by controller. Reads of a second disk by dd with O_DIRECT, in blocks of
//! 8 KiB to 10 MiB, and transactions of one byte over a tap and NAT, one after the other: each waits for one interrupt.
//!
//! Subjects of the paravirtual controller name `{load_initrd}`: the stock initrd after an archive with the guests' kernel module
//! (`guests/vioapic-linux`), which the initrd's own start-up loads. The study's driver masks, acknowledges and unmasks in eight
//! register accesses: `flow=level`. A driver that only ends an interrupt's service (`flow=fasteoi`) is beside it.

use anyhow::{Context, Result};

use super::{Bundle, Kind, Step, fileio, init, nat, net};
use crate::host::cache::Cache;
use crate::host::module;
use crate::report::{Better, Figure, Row};
use crate::sample::quote;
use crate::sysbench::Test;

/// The initrd of `{load_initrd}` in a sample's scratch directory, and the archive before it.
pub const INITRD: &str = "load-initrd";
pub const ARCHIVE: &str = "module.cpio";
/// What Debian's initrd runs before it looks for a root disk.
const START: &[u8] = b"modprobe -q virtio_mmio\ninsmod /vioapic.ko flow=${vioapic_flow:-fasteoi}\n";
/// The subject that gains are relative to, and those that have one.
const BEFORE: &str = "load-trap";
const AFTER: [&str; 10] =
    ["trap-fasteoi", "ro-page", "pv", "pv-fasteoi", "pv-status", "split", "kernel", "msi", "qemu-split", "qemu-kernel"];
/// What the study saw, over trap: dd with blocks of 8 KiB in KVM, from a read-only page, and with masks in a page.
const STUDY: &str = "The study's gains of dd with blocks of 8 KiB: kernel 171.6 %, ro-page 198.1 %, pv 215.1 %; of TCP_RR and \
                     TCP_CRR 61 % and more.";

/// The archive that brings the module, built if it is not there.
pub fn archive() -> Result<Vec<u8>> {
    let path = module::vioapic(&Cache::open()?, &|_, _| {})?;
    let module = std::fs::read(&path).with_context(|| format!("can't read {}", path.display()))?;
    Ok(init::archive(&[
        ("conf", None),
        ("conf/conf.d", None),
        ("conf/conf.d/vioapic", Some(START)),
        ("vioapic.ko", Some(&module)),
    ]))
}

/// Shell commands that put the archive before `initrd`, in a sample's scratch directory.
pub fn prepare(initrd: &str, scratch: &str) -> String {
    let path = |name: &str| quote(&format!("{scratch}/{name}"));
    format!("cat {} {} >{}", path(ARCHIVE), quote(initrd), path(INITRD))
}

/// The bundles of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let part = |full: f64, least: f64| (full * scale).round().max(least) as u64;
    let mib = part(1024.0, 24.0);
    let dd = |workload, mark, kib: u64, most: u64| {
        let count = part(most as f64, 2.0).min(mib * 1024 / kib);
        let command = format!("dd if=/dev/vdb of=/dev/null bs={kib}k count={count} iflag=direct");
        Step { workload, mark, test: Test::Dd, command, after: "" }
    };
    let disk = vec![
        dd("dd 8 KiB", "dd8", 8, 40_000),
        dd("dd 16 KiB", "dd16", 16, 40_000),
        dd("dd 128 KiB", "dd128", 128, 8_000),
        dd("dd 1 MiB", "dd1024", 1024, 1_000),
        dd("dd 10 MiB", "dd10240", 10_240, 100),
    ];
    let transact = |workload, mark, count| {
        let command = format!("tare-agent transact {workload} {} {} {count}", nat::SERVER, net::PORT);
        Step { workload, mark, test: Test::Transact, command, after: "" }
    };
    let wire = vec![transact("TCP_RR", "rr", part(40_000.0, 50.0)), transact("TCP_CRR", "crr", part(8_000.0, 20.0))];
    let limit_seconds = 60 + (400.0 * scale) as u64;
    let bundle =
        |name, steps, disk, net| Bundle { name, kind: Kind::Work(steps), memory_mib: 512, limit_seconds, disk, net };
    vec![bundle("disk", disk, Some(fileio::Disk::of(mib)), None), bundle("wire", wire, None, Some(net::Way::Nat))]
}

/// The figures of dd: coreutils says `N bytes (…) copied, S s, R MB/s`. Its requests are blocks.
pub fn dd(text: &str) -> Result<Vec<Figure>> {
    let line = text.lines().find(|line| line.contains(" copied, ")).context("no line of results in dd's output")?;
    let number =
        |word: Option<&str>| word.and_then(|word| word.parse::<f64>().ok()).filter(|n| n.is_finite() && *n > 0.0);
    let bytes = number(line.split_whitespace().next()).context("dd's line of results has no amount")?;
    let after = line.split(" copied, ").nth(1);
    let seconds = number(after.and_then(|rest| rest.split_whitespace().next())).context("dd's line has no time")?;
    let blocks = text
        .lines()
        .find_map(|line| line.strip_suffix(" records out").or(line.trim_end().strip_suffix(" records out")));
    let blocks = number(blocks.and_then(|word| word.split('+').next())).context("dd moved no whole block")?;
    Ok(vec![
        Figure::new("rate", "MiB/s", Better::Higher, bytes / seconds / f64::from(1 << 20)),
        Figure::new("events", "", Better::Higher, blocks),
    ])
}

/// Gains over trap, workload by workload.
pub fn beside_study(rows: &[Row]) -> Vec<String> {
    let gain = |name: &str| {
        let parts: Vec<String> = rows
            .iter()
            .filter(|row| row.better == Better::Higher && row.metric != "events")
            .filter_map(|row| {
                let ratio = row.median.get(&format!("load-{name}"))? / row.median.get(BEFORE)?;
                Some(format!("{} {:+.0} %", row.workload, (ratio - 1.0) * 100.0))
            })
            .collect();
        (!parts.is_empty()).then(|| format!("{name} over trap: {}.", parts.join(", ")))
    };
    let mut out: Vec<String> = AFTER.into_iter().filter_map(gain).collect();
    if !out.is_empty() {
        out.push(STUDY.to_owned());
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_study_has_all_its_blocks() {
        let text = format!("{:?}", bundles(0.05));
        for part in
            ["bs=8k count=2000", "bs=16k count=2000", "bs=128k count=400", "bs=1024k count=50", "bs=10240k count=5"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.contains("TCP_RR 10.0.6.2 5301 2000") && text.contains("TCP_CRR 10.0.6.2 5301 400"));
        // No block is read beyond the disk's data.
        assert!(format!("{:?}", bundles(0.001)).contains("bs=10240k count=2"));
    }

    #[test]
    fn dd_says_how_much_it_moved_and_how_long_it_took() {
        let text =
            "2000+0 records in\r\n2000+0 records out\r\n16384000 bytes (16 MB, 16 MiB) copied, 0.25 s, 65.5 MB/s\r\n";
        let figures = dd(text).unwrap();
        assert_eq!((figures[0].value, figures[1].value), (62.5, 2000.0));
        assert!(dd("dd: failed to open '/dev/vdb': No such file or directory").is_err());
        assert!(dd("0+0 records out\n0 bytes copied, 0.1 s, 0 B/s").is_err());
    }

    #[test]
    fn gains_are_over_trap() {
        let row = |subject: &str, value| (subject.to_owned(), value);
        let rows = [Row {
            workload: "dd 8 KiB".to_owned(),
            metric: "rate".to_owned(),
            unit: String::new(),
            better: Better::Higher,
            samples: BTreeMap::new(),
            spread: BTreeMap::new(),
            tax: BTreeMap::new(),
            no_difference: Vec::new(),
            median: BTreeMap::from([row("load-trap", 10.0), row("load-pv", 17.0)]),
        }];
        assert_eq!(beside_study(&rows)[0], "pv over trap: dd 8 KiB +70 %.");
        assert!(beside_study(&[]).is_empty());
    }
}
