// SPDX-License-Identifier: Apache-2.0
//! Suites: what is measured. A suite is a list of bundles; a bundle is what one start of a subject does, so that
//! workloads whose order cannot matter share one boot.
//!
//! A guest gets its work through the kernel command line: `/bin/sh` of the unmodified root disk is its init and the script
//! is init's argument. Nothing in an image is changed and no template needs a variable for it.

mod boot;
pub mod fileio;
pub mod init;
pub mod interrupts;
pub mod load;
mod microvm;
mod nat;
pub mod net;
pub mod passthrough;
pub mod stamps;
mod tax;

use anyhow::{Result, bail};

use crate::host::qemu::Mode;
use crate::report::Figure;
use crate::sample::Sample;
use crate::subject::{Console, Subject};
use crate::sysbench::Test;

/// What one start of a subject does.
#[derive(Clone, Debug, PartialEq)]
pub struct Bundle {
    /// Short name, for progress and notes.
    pub name: &'static str,
    /// What it does.
    pub kind: Kind,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Seconds on the place's clock until the watchdog ends it.
    pub limit_seconds: u64,
    /// A second disk, made afresh for each sample.
    pub disk: Option<fileio::Disk>,
    /// A network of the sample's own with servers on it, and the way to them.
    pub net: Option<net::Way>,
}

/// The two kinds of bundles.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Boot to the first line of user space, from kernel and initrd alone.
    Boot {
        /// The subject's own console and `quiet`, instead of a serial console with all messages.
        quiet: bool,
        /// More of the command line, a space before each word.
        words: &'static str,
    },
    /// Run steps in order, on the root disk.
    Work(Vec<Step>),
    /// Take interrupts, in a guest without a kernel; see [`interrupts`].
    Guest {
        /// How many.
        count: u64,
    },
    /// Run steps in order, on the root disk, with devices of the host; see [`passthrough`].
    Handed(passthrough::Handed),
}

/// One workload of a bundle.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Name in tables.
    pub workload: &'static str,
    /// Name in marks: one word.
    pub mark: &'static str,
    /// What its output looks like.
    pub test: Test,
    /// Shell command.
    pub command: String,
    /// Shell command after it, not measured.
    pub after: &'static str,
}

/// The suites by name, with what they measure; shown by `tare-lab list`.
pub const SUITES: &[(&str, &str)] = &[
    ("tax", "sysbench cpu, memory, mutex, threads, fileio (prepare, rndrw buffered and O_DIRECT)"),
    ("boot", "boot to the first line of user space, exits by kind, memory of the monitor beside the guest's"),
    (
        "fileio",
        "fio on a qcow2 disk: writes that allocate over nothing, zeroes and data; rewrites; rndrw (see {qcow2} and {raw})",
    ),
    ("net", "iperf3 both ways, TCP_RR and TCP_CRR, over passt, a tap and vhost-net (see {mac}, {tap} and {passt})"),
    (
        "microvm",
        "the StratoVirt study: boot phases, memory of a 1 GiB guest, sysbench cpu, memory and fileio by threads, blocks and modes",
    ),
    (
        "interrupts",
        "one interrupt by controller: trap, ro-page, pv, split, kernel, msi; exits by kind, injection and response apart",
    ),
    (
        "irq-load",
        "dd with O_DIRECT by block size, TCP_RR and TCP_CRR over NAT, by interrupt controller; gains over trap (see {load_initrd})",
    ),
    (
        "passthrough",
        "an NVMe disk (fio verify) and a network card (iperf3) of the host in the guest, by kind of page; phases of the start, of 8 GiB, too",
    ),
    ("all", "tax and boot in one report"),
];

/// The bundles of a suite, or the one of `SUITE/BUNDLE`.
pub fn suite(name: &str, scale: f64) -> Result<Vec<Bundle>> {
    let (suite, only) = name.split_once('/').map_or((name, None), |(suite, bundle)| (suite, Some(bundle)));
    let mut bundles = match suite {
        "tax" => tax::bundles(scale),
        "boot" => boot::bundles(),
        "fileio" => fileio::bundles(scale),
        "net" => net::bundles(scale),
        "microvm" => microvm::bundles(scale),
        "interrupts" => interrupts::bundles(scale),
        "irq-load" => load::bundles(scale),
        "passthrough" => passthrough::bundles(scale),
        "all" => [tax::bundles(scale), boot::bundles()].concat(),
        _ => bail!("no suite '{suite}'; there are: {}", SUITES.map_names()),
    };
    if let Some(only) = only {
        let names: Vec<&str> = bundles.iter().map(|bundle| bundle.name).collect();
        if !names.contains(&only) {
            bail!("suite '{suite}' has no part '{only}'; its parts are: {}", names.join(", "));
        }
        bundles.retain(|bundle| bundle.name == only);
    }
    Ok(bundles)
}

trait MapNames {
    fn map_names(&self) -> String;
}

impl MapNames for [(&str, &str)] {
    fn map_names(&self) -> String {
        self.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

/// Who is measured when `--subjects` does not say.
pub fn subjects(suite: &str) -> &'static str {
    match suite.split('/').next() {
        Some("microvm") => "native,qemu-microvm,qemu,tare",
        Some("fileio") => "qemu-raw,qemu-qcow2,tare-raw,tare-explicit,tare-unallocated,tare-zero-aware",
        Some("interrupts") => "tare-trap,tare-ro-page,tare-pv,tare-split,tare-kernel,tare-msi,qemu-split,qemu-kernel",
        Some("irq-load") => {
            "load-trap,load-trap-fasteoi,load-ro-page,load-pv,load-pv-fasteoi,load-pv-status,load-split,load-kernel,load-msi,load-qemu-split,load-qemu-kernel"
        }
        Some("passthrough") => "qemu-vfio,tare-vfio,tare-vfio-touch,tare-vfio-background",
        Some("net") => "qemu-user,tare-user,qemu-tap,tare-tap,qemu-vhost,tare-vhost",
        _ => "native,qemu,tare",
    }
}

/// The lab machine that a suite runs on.
pub fn machine(suite: &str) -> Mode {
    if suite.split('/').next() == Some("passthrough") { Mode::Passthrough } else { Mode::Counted }
}

/// The workloads of some bundles in table order.
pub fn workloads(bundles: &[Bundle]) -> Vec<String> {
    let names = |bundle: &Bundle| match &bundle.kind {
        Kind::Boot { .. } | Kind::Guest { .. } => vec![bundle.name.to_owned()],
        Kind::Work(steps) => steps.iter().map(|step| step.workload.to_owned()).collect(),
        Kind::Handed(handed) => {
            let steps = handed.steps.iter().map(|step| step.workload);
            std::iter::once(bundle.name).chain(steps).map(str::to_owned).collect()
        }
    };
    bundles.iter().flat_map(names).collect()
}

impl Bundle {
    /// Whether the subject takes part: native has nothing to boot.
    pub fn fits(&self, subject: &Subject) -> bool {
        match &self.kind {
            Kind::Boot { .. } => !subject.is_native(),
            Kind::Guest { .. } => subject.template.contains("controller="),
            Kind::Handed(handed) => subject.wants(if handed.card { "handed_card" } else { "handed_disk" }),
            Kind::Work(_) if self.net.is_some() => subject.wants("mac"),
            Kind::Work(steps) if subject.is_native() && steps.iter().any(|step| step.test == Test::Phases) => false,
            Kind::Work(_) if self.disk.is_some() => subject.wants("qcow2") || subject.wants("raw"),
            Kind::Work(_) => subject.is_native() || subject.wants("disk"),
        }
    }

    /// True when the guest needs its root disk.
    pub fn needs_disk(&self) -> bool {
        matches!(self.kind, Kind::Work(_) | Kind::Handed(_))
    }

    /// The console a subject gets in this bundle. Work has a serial one for all, like for like.
    pub fn console(&self, subject: &Subject) -> Console {
        match self.kind {
            Kind::Boot { quiet: true, .. } => subject.own_console(),
            _ => Console::Serial,
        }
    }

    /// Seconds between two looks at the console: short where its moment is the figure.
    pub fn poll_millis(&self) -> u64 {
        match &self.kind {
            Kind::Boot { .. } | Kind::Guest { .. } | Kind::Handed(_) => 2,
            Kind::Work(steps) if steps.iter().any(|step| step.test == Test::Phases) => 2,
            Kind::Work(_) => 25,
        }
    }

    /// The kernel command line of a guest; `root` is what `root=` should say.
    pub fn cmdline(&self, console: Console, root: &str) -> String {
        // The dummy screen lets a stock initrd open its console before it has loaded the virtio module.
        let console = if console == Console::Virtio { "tty0 console=hvc0" } else { console.device() };
        match &self.kind {
            Kind::Boot { quiet, words } => {
                let quiet = if *quiet { " quiet" } else { "" };
                format!("console={console}{quiet} reboot=k panic=-1{words}")
            }
            Kind::Guest { count } => format!("count={count} marks"),
            Kind::Work(steps) => {
                let setup = if self.net.is_some() { net::SETUP } else { "" };
                let init = tax::init(setup, steps);
                format!("console={console} quiet root={root} rw panic=-1 init=/bin/sh -- -c \"{init}\"")
            }
            // Its initrd mounts the root disk and hands the script on.
            Kind::Handed(handed) => format!("console={console} quiet panic=-1 -- -c \"{}\"", handed.init()),
        }
    }

    /// The command that does the same work natively, in directory `data`.
    pub fn native(&self, data: &str) -> Vec<String> {
        let steps: &[Step] = match &self.kind {
            Kind::Boot { .. } | Kind::Guest { .. } | Kind::Handed(_) => &[],
            Kind::Work(steps) => steps,
        };
        vec!["sh".to_owned(), "-c".to_owned(), tax::native(steps, data)]
    }

    /// The figures of a sample, with their workloads. An error means the sample has failed.
    pub fn figures(&self, sample: &Sample) -> Result<Vec<(&'static str, Figure)>> {
        match &self.kind {
            Kind::Boot { .. } => boot::figures(self.name, sample),
            Kind::Guest { .. } => interrupts::figures(sample),
            Kind::Work(steps) => tax::figures(steps, sample),
            Kind::Handed(handed) => handed.figures(self.name, sample),
        }
    }

    /// Exits of a sample by workload.
    pub fn exits(&self, sample: &Sample) -> Vec<(&'static str, crate::price::Exits)> {
        match &self.kind {
            Kind::Boot { .. } => sample.exits(None, "ready").map(|exits| (self.name, exits)).into_iter().collect(),
            Kind::Guest { .. } => sample.exits(None, "done").map(|exits| (self.name, exits)).into_iter().collect(),
            Kind::Work(steps) | Kind::Handed(passthrough::Handed { steps, .. }) => steps
                .iter()
                .filter_map(|step| {
                    let exits = sample.exits(Some(&format!("begin {}", step.mark)), &format!("end {}", step.mark))?;
                    Some((step.workload, exits))
                })
                .collect(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// x86's COMMAND_LINE_SIZE, with room for what a monitor adds.
    const LIMIT: usize = 2048 - 128;

    #[test]
    fn command_lines_fit_and_keep_their_script_in_one_quoted_word() {
        for scale in [1.0, 0.1, 0.001] {
            for bundle in ["all", "fileio", "net", "microvm", "irq-load", "passthrough"]
                .iter()
                .flat_map(|name| suite(name, scale).unwrap())
            {
                let line = bundle.cmdline(Console::Serial, "/dev/vda");
                assert!(line.len() < LIMIT, "{} is {} bytes long", bundle.name, line.len());
                let quotes = if bundle.needs_disk() { 2 } else { 0 };
                assert_eq!(line.matches('"').count(), quotes, "the kernel knows no escapes: {line}");
                assert!(!line.contains('\n') && !line.contains('\''));
                assert!(!line.contains("@@lab"), "the kernel prints its command line, which must not look like a mark");
            }
        }
    }

    #[test]
    fn native_takes_no_part_in_boots_and_diskless_monitors_none_in_work() {
        let all = suite("all", 0.1).unwrap();
        let fit = |subject: &str| {
            let subject = Subject::parse(subject).unwrap();
            all.iter().filter(|bundle| bundle.fits(&subject)).map(|bundle| bundle.name).collect::<Vec<_>>()
        };
        assert_eq!(fit("native"), ["compute", "fileio"]);
        assert_eq!(fit("firecracker"), ["boot", "boot quiet", "boot untested"]);
        assert_eq!(fit("tare").len(), 5);
        assert_eq!(suite("tax/fileio", 0.1).unwrap().len(), 1);
        assert!(suite("tax/disk", 0.1).unwrap_err().to_string().contains("compute, fileio"));
        assert!(
            suite("speed", 1.0)
                .unwrap_err()
                .to_string()
                .contains("tax, boot, fileio, net, microvm, interrupts, irq-load, passthrough, all")
        );
    }

    #[test]
    fn a_bundle_with_a_second_disk_takes_those_that_can_have_one() {
        let all = suite("fileio", 0.1).unwrap();
        for name in subjects("fileio").split(',') {
            assert!(all[0].fits(&Subject::parse(name).unwrap()), "{name}");
        }
        for name in ["native", "tare", "firecracker"] {
            assert!(!all[0].fits(&Subject::parse(name).unwrap()), "{name}");
        }
        assert_eq!(subjects("tax/compute"), "native,qemu,tare");
    }

    #[test]
    fn a_bundle_with_a_network_takes_those_that_name_its_address() {
        let all = suite("net", 0.1).unwrap();
        let subjects: Vec<_> = subjects("net").split(',').collect();
        assert_eq!(subjects.len(), 6);
        for name in subjects {
            assert!(all[0].fits(&Subject::parse(name).unwrap()), "{name}");
        }
        for name in ["native", "tare", "tare-raw", "firecracker"] {
            assert!(!all[0].fits(&Subject::parse(name).unwrap()), "{name}");
        }
    }

    #[test]
    fn the_console_of_the_first_table_is_serial_for_all() {
        let all = suite("boot", 1.0).unwrap();
        let tare = Subject::parse("tare").unwrap();
        assert_eq!(all[0].console(&tare), Console::Serial);
        assert_eq!(all[1].console(&tare), Console::Virtio);
        assert_eq!(all[1].console(&Subject::parse("qemu").unwrap()), Console::Serial);
        assert!(all[1].cmdline(Console::Virtio, "").contains("console=hvc0 quiet"));
        assert!(all[2].cmdline(Console::Virtio, "").ends_with("panic=-1 cryptomgr.notests"));
    }
}
