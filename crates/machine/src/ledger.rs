// SPDX-License-Identifier: Apache-2.0
//! The ledger: what a run cost and where. Kept for every run, printed as a table or written as JSON by the CLI.
//!
//! The hot half is [`Counters`], owned by each vCPU thread and touched once per exit; the rest is gathered at the end from
//! KVM's statistics, `/proc` and the devices' own counters.

use std::collections::BTreeMap;
use std::fmt;

use kvm::{StatKind, StatUnit, StatValue};
use serde::Serialize;

use crate::places::Place;
use crate::ready::StartUp;
use crate::timeline::Moment;

/// Who an exit was for. The order is that of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Party {
    /// The 16550.
    Serial,
    /// The i8042's reset line.
    I8042,
    /// pvpanic.
    Pvpanic,
    /// ACPI sleep and reset registers.
    Acpi,
    /// CF8/CFC configuration access.
    PciPorts,
    /// ECAM configuration access.
    PciEcam,
    /// A BAR of a PCI device.
    PciBar,
    /// Registers of a virtio device that is no PCI function.
    VirtioMmio,
    /// The I/O APIC.
    IoApic,
    /// The paravirtual interrupt controller.
    Vioapic,
    /// The debug exit.
    DebugExit,
    /// A marker port: see `timeline`.
    Marker,
    /// No device there.
    Nobody,
    /// KVM itself (signals, halts, errors).
    Kvm,
}

const PARTIES: [(Party, &str); 14] = [
    (Party::Serial, "serial"),
    (Party::I8042, "i8042"),
    (Party::Pvpanic, "pvpanic"),
    (Party::Acpi, "acpi"),
    (Party::PciPorts, "pci-ports"),
    (Party::PciEcam, "pci-ecam"),
    (Party::PciBar, "pci-bar"),
    (Party::VirtioMmio, "virtio-mmio"),
    (Party::IoApic, "ioapic"),
    (Party::Vioapic, "vioapic"),
    (Party::DebugExit, "debug-exit"),
    (Party::Marker, "marker"),
    (Party::Nobody, "nobody"),
    (Party::Kvm, "kvm"),
];

/// Why the guest left to the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Reason {
    /// A port was read.
    PioRead,
    /// A port was written.
    PioWrite,
    /// An address outside RAM was read.
    MmioRead,
    /// An address outside RAM was written.
    MmioWrite,
    /// The end of a level-triggered interrupt.
    Eoi,
    /// A signal to the vCPU thread.
    Signal,
    /// Anything else.
    Other,
}

const REASONS: [(Reason, &str); 7] = [
    (Reason::PioRead, "pio-read"),
    (Reason::PioWrite, "pio-write"),
    (Reason::MmioRead, "mmio-read"),
    (Reason::MmioWrite, "mmio-write"),
    (Reason::Eoi, "eoi"),
    (Reason::Signal, "signal"),
    (Reason::Other, "other"),
];

impl Reason {
    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        REASONS.iter().find(|(reason, _)| *reason == self).map_or("other", |(_, name)| name)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    count: u64,
    ticks: u64,
}

/// Exits to the monitor of one vCPU, by reason and party. Two additions an exit; time is in TSC ticks until the end.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    cells: [[Cell; PARTIES.len()]; REASONS.len()],
    /// Ticks spent in `KVM_RUN`.
    pub run_ticks: u64,
}

impl Counters {
    /// Counts one exit that took `ticks` to answer.
    #[inline]
    pub fn add(&mut self, reason: Reason, party: Party, ticks: u64) {
        let cell = &mut self.cells[reason as usize][party as usize];
        cell.count += 1;
        cell.ticks += ticks;
    }

    fn rows(&self, ns_per_tick: f64) -> Vec<ExitRow> {
        let mut rows = Vec::new();
        for (reason, reason_name) in REASONS {
            for (party, party_name) in PARTIES {
                let cell = self.cells[reason as usize][party as usize];
                if cell.count > 0 {
                    rows.push(ExitRow {
                        reason: reason_name,
                        device: party_name,
                        count: cell.count,
                        ns: (cell.ticks as f64 * ns_per_tick) as u64,
                    });
                }
            }
        }
        rows
    }

    fn monitor_ticks(&self) -> u64 {
        self.cells.iter().flatten().map(|c| c.ticks).sum()
    }
}

/// The time-stamp counter, for intervals of one run.
#[inline]
#[must_use]
pub fn ticks() -> u64 {
    // SAFETY: RDTSC exists on every x86_64 and has no memory effects.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Exits to the monitor of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct ExitRow {
    /// Why.
    pub reason: &'static str,
    /// For whom.
    pub device: &'static str,
    /// How many.
    pub count: u64,
    /// Time in the monitor, nanoseconds.
    pub ns: u64,
}

/// What one vCPU did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VcpuLedger {
    /// Its number.
    pub id: u8,
    /// In the guest, nanoseconds (the kernel's guest time of the thread; as coarse as its tick accounting).
    pub guest_ns: u64,
    /// In KVM on the guest's behalf, nanoseconds: time in `KVM_RUN` that was neither guest nor halted.
    pub kvm_ns: u64,
    /// Halted, nanoseconds.
    pub halted_ns: u64,
    /// In the monitor, nanoseconds.
    pub monitor_ns: u64,
    /// Exits to the monitor.
    pub exits: Vec<ExitRow>,
    /// KVM's counters of this vCPU that are not 0.
    pub kvm: BTreeMap<String, u64>,
}

impl VcpuLedger {
    /// Draws up a vCPU's account from what its thread counted and KVM's statistics.
    #[must_use]
    pub fn new(id: u8, counters: &Counters, ns_per_tick: f64, guest_ns: u64, stats: &[StatValue]) -> Self {
        let kvm = plain(stats);
        let halted_ns =
            kvm.get("halt_wait_ns").copied().unwrap_or(0) + kvm.get("halt_poll_success_ns").copied().unwrap_or(0);
        let run_ns = (counters.run_ticks as f64 * ns_per_tick) as u64;
        Self {
            id,
            guest_ns,
            kvm_ns: run_ns.saturating_sub(guest_ns).saturating_sub(halted_ns),
            halted_ns,
            monitor_ns: (counters.monitor_ticks() as f64 * ns_per_tick) as u64,
            exits: counters.rows(ns_per_tick),
            kvm,
        }
    }
}

/// What one device did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeviceLedger {
    /// Its name, as `disk0`.
    pub name: String,
    /// Requests finished.
    pub requests: u64,
    /// Bytes that went to the guest.
    pub bytes_read: u64,
    /// Bytes that came from the guest.
    pub bytes_written: u64,
    /// Times the guest's doorbell woke the device.
    pub kicks: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Times a queue stopped with requests waiting, because of the disk's rate limits.
    pub throttled: u64,
    /// For how long, nanoseconds; queues that wait at the same time add up.
    pub throttled_ns: u64,
    /// Interrupts that waited for further requests to finish (`coalesce=`).
    pub coalesced: u64,
    /// For how long, nanoseconds, added up.
    pub coalesced_ns: u64,
}

/// Memory of the process, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryLedger {
    /// Guest memory that exists on the host.
    pub guest_rss: u64,
    /// Of it, in huge pages.
    pub guest_huge: u64,
    /// All else of the process.
    pub monitor_rss: u64,
    /// All else, shared pages divided among their users.
    pub monitor_pss: u64,
}

/// One run's account.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Ledger {
    /// Layout of this document.
    pub version: u32,
    /// From the start of the monitor's set-up to the end of the guest, nanoseconds.
    pub wall_ns: u64,
    /// Of it, before the guest's first instruction.
    pub setup_ns: u64,
    /// Exits of all kinds, those that KVM answered itself included; 0 where KVM has no statistics.
    pub exits: u64,
    /// Exits that came to the monitor.
    pub monitor_exits: u64,
    /// Interrupts injected into the guest, as KVM counts them.
    pub interrupts: u64,
    /// Per vCPU.
    pub vcpus: Vec<VcpuLedger>,
    /// Per device.
    pub devices: Vec<DeviceLedger>,
    /// Exits that the user had left out, as `hlt`.
    pub disabled_exits: Vec<&'static str>,
    /// What of the host's hardware delivers interrupts to running vCPUs without exits: `apicv`, `avic`, or nothing.
    pub interrupt_hardware: Option<&'static str>,
    /// What the phases of the start took.
    pub startup: StartUp,
    /// What had been reached when; with exits if the timeline was asked for.
    pub timeline: Vec<Moment>,
    /// Exits to the monitor by place, most frequent first; empty unless the timeline was asked for.
    pub places: Vec<Place>,
    /// Memory at the end of the run.
    pub memory: MemoryLedger,
    /// KVM's counters of the VM that are not 0.
    pub kvm: BTreeMap<String, u64>,
}

impl Ledger {
    /// Adds up the vCPUs.
    pub fn total(&mut self) {
        let sum = |key: &str| self.vcpus.iter().filter_map(|v| v.kvm.get(key)).sum();
        self.exits = sum("exits");
        self.interrupts = sum("irq_injections");
        self.monitor_exits = self.vcpus.iter().flat_map(|v| &v.exits).map(|e| e.count).sum();
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(
            f,
            "ledger: {:.1} ms, {:.1} of them set-up; {} exits, {} to the monitor; {} interrupts",
            ms(self.wall_ns),
            ms(self.setup_ns),
            self.exits,
            self.monitor_exits,
            self.interrupts
        )?;
        writeln!(f, "{:<6} {:>12} {:>12} {:>12} {:>12}", "vcpu", "guest ms", "kvm ms", "halted ms", "monitor ms")?;
        for v in &self.vcpus {
            let row = [v.guest_ns, v.kvm_ns, v.halted_ns, v.monitor_ns].map(ms);
            writeln!(f, "{:<6} {:>12.1} {:>12.1} {:>12.1} {:>12.1}", v.id, row[0], row[1], row[2], row[3])?;
        }
        writeln!(f, "{:<6} {:<11} {:<11} {:>12} {:>12}", "vcpu", "exit", "device", "count", "ms")?;
        for v in &self.vcpus {
            for e in &v.exits {
                writeln!(f, "{:<6} {:<11} {:<11} {:>12} {:>12.2}", v.id, e.reason, e.device, e.count, ms(e.ns))?;
            }
        }
        writeln!(
            f,
            "{:<10} {:>10} {:>14} {:>14} {:>10} {:>10}",
            "device", "requests", "bytes read", "written", "kicks", "irqs"
        )?;
        for d in &self.devices {
            writeln!(
                f,
                "{:<10} {:>10} {:>14} {:>14} {:>10} {:>10}",
                d.name, d.requests, d.bytes_read, d.bytes_written, d.kicks, d.interrupts
            )?;
        }
        // A packet is what a NIC's request is; all exits of the machine are counted, whatever they were for.
        let exits: u64 = self.vcpus.iter().filter_map(|v| v.kvm.get("exits")).sum();
        for d in self.devices.iter().filter(|d| d.name.starts_with("net") && d.requests > 0) {
            let each = |count: u64| count as f64 / d.requests as f64;
            writeln!(
                f,
                "{}: {:.0} bytes, {:.3} kicks, {:.3} interrupts and {:.2} of the machine's exits a packet",
                d.name,
                each(d.bytes_read + d.bytes_written),
                each(d.kicks),
                each(d.interrupts),
                each(exits)
            )?;
        }
        for d in self.devices.iter().filter(|d| d.throttled > 0) {
            writeln!(f, "{} waited {} times for its rate limits, {:.1} ms", d.name, d.throttled, ms(d.throttled_ns))?;
        }
        for d in self.devices.iter().filter(|d| d.coalesced > 0) {
            let each = d.coalesced_ns as f64 / d.coalesced as f64 / 1000.0;
            writeln!(f, "{} put {} interrupts off, by {each:.1} us each", d.name, d.coalesced)?;
        }
        writeln!(
            f,
            "memory: guest {:.1} MiB ({:.1} huge), monitor {:.1} MiB RSS, {:.1} MiB PSS",
            mib(self.memory.guest_rss),
            mib(self.memory.guest_huge),
            mib(self.memory.monitor_rss),
            mib(self.memory.monitor_pss)
        )?;
        writeln!(f, "{}", self.startup.line())?;
        let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, value) in self.vcpus.iter().flat_map(|v| &v.kvm) {
            *totals.entry(name).or_default() += value;
        }
        self.show_costs(f, &totals)?;
        let line: Vec<String> = totals.iter().map(|(name, value)| format!("{name} {value}")).collect();
        writeln!(f, "kvm: {}", line.join(", "))
    }
}

impl Ledger {
    /// What idle vCPUs cost the host: polling before they slept, or the host CPUs they kept.
    fn show_costs(&self, f: &mut fmt::Formatter<'_>, totals: &BTreeMap<&str, u64>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        let of = |name: &str| totals.get(name).copied().unwrap_or(0);
        let (hit, missed) = (of("halt_poll_success_ns"), of("halt_poll_fail_ns"));
        if hit + missed > 0 {
            let all = ms(hit + missed);
            writeln!(f, "halt polling: {all:.1} ms of the host's CPU time, {:.1} of them in vain", ms(missed))?;
        }
        if let Some(hardware) = self.interrupt_hardware {
            writeln!(f, "interrupts by {hardware}: no exits to deliver them to vCPUs that run")?;
        }
        if self.disabled_exits.contains(&"hlt") {
            let held: u64 = self.vcpus.iter().map(|v| v.guest_ns + v.kvm_ns).sum();
            let most = ms(self.wall_ns) * self.vcpus.len() as f64;
            writeln!(f, "no exits on hlt: vCPUs held host CPUs for {:.1} of {most:.1} ms, idle or not", ms(held))?;
        }
        Ok(())
    }
}

/// Single-valued counters that are not 0, by name; histograms are left out.
#[must_use]
pub fn plain(stats: &[StatValue]) -> BTreeMap<String, u64> {
    stats
        .iter()
        .filter(|s| s.kind != StatKind::Histogram && s.unit != StatUnit::Boolean)
        .filter_map(|s| Some((s.name.clone(), *s.values.first()?)))
        .filter(|(_, value)| *value != 0)
        .collect()
}

/// Sorts the process's memory into the guest's and the rest, from the text of `/proc/self/smaps`. `guest` are host address
/// ranges, start and end.
#[must_use]
pub fn memory(smaps: &str, guest: &[(u64, u64)]) -> MemoryLedger {
    let mut out = MemoryLedger::default();
    let mut in_guest = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else { continue };
        if let Some(range) = parse_range(first) {
            in_guest = guest.iter().any(|g| range.0 >= g.0 && range.1 <= g.1);
            continue;
        }
        let Some(kib) = second.and_then(|w| w.parse::<u64>().ok()) else { continue };
        match (first, in_guest) {
            ("Rss:", true) => out.guest_rss += kib << 10,
            ("AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:", true) => out.guest_huge += kib << 10,
            // Pages that the host has set aside are in no other count.
            ("Shared_Hugetlb:" | "Private_Hugetlb:", true) => {
                out.guest_rss += kib << 10;
                out.guest_huge += kib << 10;
            }
            ("Rss:", false) => out.monitor_rss += kib << 10,
            ("Pss:", false) => out.monitor_pss += kib << 10,
            _ => {}
        }
    }
    out
}

fn parse_range(word: &str) -> Option<(u64, u64)> {
    let (start, end) = word.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// Nanoseconds of guest time of thread `tid`, from field 43 of its `stat` file (proc(5)), 0 if it can't be read.
#[must_use]
pub fn guest_time_ns(stat: &str, ticks_per_second: u64) -> u64 {
    // The command name may hold anything, so fields are counted from its closing parenthesis: field 3 comes next.
    let after = stat.rfind(')').map_or("", |at| &stat[at + 1..]);
    let guest_ticks: u64 = after.split_ascii_whitespace().nth(43 - 3).and_then(|w| w.parse().ok()).unwrap_or(0);
    guest_ticks.saturating_mul(1_000_000_000 / ticks_per_second.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaps_is_sorted_into_guest_and_monitor() {
        let smaps = "7f0000000000-7f0010000000 rw-p 00000000 00:00 0 \n\
                     Rss:               65536 kB\nPss:               65536 kB\nAnonHugePages:     63488 kB\n\
                     55aa00000000-55aa00100000 r-xp 00000000 08:01 42 /usr/bin/tare\n\
                     Rss:                 900 kB\nPss:                 450 kB\nAnonHugePages:         0 kB\n";
        let got = memory(smaps, &[(0x7f00_0000_0000, 0x7f00_1000_0000)]);
        assert_eq!(
            got,
            MemoryLedger {
                guest_rss: 65536 << 10,
                guest_huge: 63488 << 10,
                monitor_rss: 900 << 10,
                monitor_pss: 450 << 10
            }
        );
    }

    #[test]
    fn guest_time_survives_odd_thread_names() {
        let fields: Vec<String> = (3..=52).map(|n| if n == 43 { "250".into() } else { "7".into() }).collect();
        let stat = format!("12 (vcpu) 0) {}", fields.join(" "));
        assert_eq!(guest_time_ns(&stat, 100), 2_500_000_000);
        assert_eq!(guest_time_ns("", 100), 0);
    }

    #[test]
    fn what_idle_vcpus_cost_is_told() {
        let kvm = [("halt_poll_success_ns", 1_500_000), ("halt_poll_fail_ns", 500_000)].map(|(n, v)| (n.to_owned(), v));
        let v = VcpuLedger { guest_ns: 3_000_000, kvm_ns: 1_000_000, kvm: kvm.into(), ..VcpuLedger::default() };
        let ledger = Ledger {
            wall_ns: 10_000_000,
            vcpus: vec![v.clone(), v],
            disabled_exits: vec!["hlt", "pause"],
            interrupt_hardware: Some("avic"),
            ..Ledger::default()
        };
        let text = ledger.to_string();
        assert!(text.contains("\nhalt polling: 4.0 ms of the host's CPU time, 1.0 of them in vain\n"), "{text}");
        assert!(text.contains("\nno exits on hlt: vCPUs held host CPUs for 8.0 of 20.0 ms, idle or not\n"), "{text}");
        assert!(text.contains("\ninterrupts by avic: "), "{text}");
        let text = Ledger::default().to_string();
        assert!(!text.contains("interrupts by"), "{text}");
        assert!(!text.contains("halt polling") && !text.contains("no exits on hlt"), "{text}");
    }

    #[test]
    fn counters_become_rows_and_totals() {
        let mut c = Counters::default();
        c.add(Reason::PioWrite, Party::Serial, 10);
        c.add(Reason::PioWrite, Party::Serial, 30);
        c.add(Reason::MmioRead, Party::PciBar, 5);
        c.run_ticks = 1000;
        let v = VcpuLedger::new(0, &c, 2.0, 500, &[]);
        assert_eq!((v.kvm_ns, v.monitor_ns), (1500, 90));
        assert_eq!(v.exits.len(), 2);
        assert_eq!(
            (v.exits[0].reason, v.exits[0].device, v.exits[0].count, v.exits[0].ns),
            ("pio-write", "serial", 2, 80)
        );
    }
}
