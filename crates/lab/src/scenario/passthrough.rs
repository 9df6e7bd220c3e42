// SPDX-License-Identifier: Apache-2.0
//! Suite `passthrough`: devices of the host in the stock Debian guest. fio verifies an NVMe disk and iperf3 fills a network
//! card, with guest memory of each kind of page, and the phases of the monitor's start are beside what the user waits for. The
//! last part starts a guest of 8 GiB that is there at once, or becomes ready while it runs.
//!
//! It needs the lab machine that has an IOMMU and devices to hand on ([`Mode::Passthrough`](crate::host::qemu::Mode)), whose
//! time is the host's: the order of samples is mixed and what counts is the ratio.

use anyhow::{Context, Result};

use super::{Bundle, Kind, Step, tax};
use crate::report::{Better, Figure, Row};
use crate::sample::{Sample, quote};
use crate::sysbench::Test;

/// The disk and the card that are handed on.
pub const DISK: &str = "0000:01:00.0";
pub const CARD: &str = "0000:02:00.0";
/// The guest's initrd in a sample's scratch directory.
pub const INITRD: &str = "initrd";
/// The guest's address on the card's wire and the host's.
const GUEST: &str = "10.0.6.2";
const HOST: &str = "10.0.6.1";
/// Has the guest's kernel send from single pages. The lab's emulated card drops a packet of which a part crosses into a page that
/// lies elsewhere in the memory of its host, as nearly all do where that is in pages of 4 KiB.
const ORDER: &str = "/proc/sys/net/core/high_order_alloc_disable";
const PREPARE: &str = include_str!("passthrough.sh");
/// The part in which memory may come later, and its guest.
const LARGE: &str = "start of 8 GiB";
const LARGE_MIB: u64 = 8192;
/// What the user waits for.
const USER_SPACE: &str = "time to user space";

/// What a guest is given, and from what its memory is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Handed {
    /// As in `pages=`.
    pub pages: &'static str,
    /// The card, too.
    pub card: bool,
    /// What the guest does.
    pub steps: Vec<Step>,
}

/// A part with its name and pages, and the names of its workloads.
const KINDS: [(&str, &str, [&str; 3]); 4] = [
    ("start, 4K", "4K", ["fio verify, 4K", "iperf3 out, 4K", "iperf3 in, 4K"]),
    ("start, THP", "thp", ["fio verify, THP", "iperf3 out, THP", "iperf3 in, THP"]),
    ("start, 2M", "2M", ["fio verify, 2M", "iperf3 out, 2M", "iperf3 in, 2M"]),
    ("start, 1G", "1G", ["fio verify, 1G", "iperf3 out, 1G", "iperf3 in, 1G"]),
];

/// The bundles of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let mib = (256.0 * scale).round().max(4.0) as u64;
    let step = |workload, mark, test, command| Step { workload, mark, test, command, after: "" };
    let stream = |way: &str| format!("iperf3 --client {HOST} --format k --interval 0 --bytes {mib}M{way}");
    let fio = format!(
        "fio --name=x --filename=/dev/nvme0n1 --minimal --thread --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
         --bs=4k --size={mib}M --verify=crc32c --do_verify=1 --verify_fatal=1"
    );
    let bundle = |name, memory_mib, handed| Bundle {
        name,
        kind: Kind::Handed(handed),
        memory_mib,
        // Its clock is this host's, which may have other things to do.
        limit_seconds: memory_mib / 8 + 240 + (600.0 * scale) as u64,
        disk: None,
        net: None,
    };
    let mut out: Vec<Bundle> = KINDS
        .into_iter()
        .map(|(name, pages, [verify, to, from])| {
            let steps = vec![
                step(verify, "fio", Test::Fio, fio.clone()),
                step(to, "out", Test::Iperf, stream("")),
                step(from, "in", Test::Iperf, stream(" --reverse")),
            ];
            bundle(name, 1024, Handed { pages, card: true, steps })
        })
        .collect();
    let steps = vec![step("memory, 8 GiB", "grown", Test::Total, "grown".to_owned())];
    out.push(bundle(LARGE, LARGE_MIB, Handed { pages: "thp", card: false, steps }));
    out
}

impl Handed {
    /// What the guest does before its work: it says that user space is there, and brings up what it was given. The larger guest
    /// waits for its memory, which may be all there from the start, and says what it has if it never comes.
    fn setup(&self) -> String {
        let rest = if self.card {
            format!(
                "modprobe -a nvme vmxnet3;until [ -b /dev/nvme0n1 ];do sleep .1;done;n=$(ls /sys/bus/pci/drivers/vmxnet3/0000:*/net);\
                 ip addr add {GUEST}/24 dev $n;ip link set $n up;echo 1 >{ORDER};until grep -q 1 /sys/class/net/$n/carrier;do sleep .1;done;"
            )
        } else {
            // A kernel takes a 34th at its start, and what is plugged comes in pieces of a 64th.
            let least = LARGE_MIB * 1024 / 30 * 29;
            format!(
                "modprobe virtio_mem;grown(){{ i=0;until k=$(sed -n s/MemTotal:.//p /proc/meminfo|tr -dc 0-9);[ $k -ge {least} ]||[ $i -ge 2000 ];\
                 do i=$((i+1));sleep .2;done;echo total $k KiB;}};"
            )
        };
        format!("q=@@;echo ${{q}}lab ready;{rest}")
    }

    /// What the guest's first process runs.
    pub fn init(&self) -> String {
        tax::init(&self.setup(), &self.steps)
    }

    /// Shell commands that make the sample's host ready, in directory `scratch`; `disk` is the guest's root, of which the modules
    /// in its initrd are.
    pub fn prepare(&self, scratch: &str, disk: &str, memory_mib: u64) -> String {
        let handed = if self.card { format!("{DISK} {CARD}") } else { DISK.to_owned() };
        let address = if self.card { HOST } else { "" };
        let set: String = [
            ("SCRATCH", scratch),
            ("DISK", disk),
            ("PAGES", self.pages),
            ("MIB", &memory_mib.to_string()),
            ("HANDED", &handed),
            ("ADDRESS", address),
        ]
        .iter()
        .map(|(name, value)| format!("{name}={}\n", quote(value)))
        .collect();
        // In a shell of its own: its names are not the runner's.
        format!("(\n{set}{PREPARE})")
    }

    /// QEMU's object for memory of these pages.
    pub fn qemu_memory(&self) -> String {
        match self.pages {
            "2M" | "1G" => format!("memory-backend-memfd,hugetlb=on,hugetlbsize={}", self.pages),
            _ => "memory-backend-ram".to_owned(),
        }
    }

    /// The figures of one sample of the bundle called `name`.
    pub fn figures(&self, name: &'static str, sample: &Sample) -> Result<Vec<(&'static str, Figure)>> {
        let ready = sample.need("ready")?;
        let mut out = vec![(name, Figure::new(USER_SPACE, "s", Better::Lower, ready.micros as f64 / 1e6))];
        // Other monitors don't say.
        if let Some(line) = sample.stderr.lines().find_map(|line| line.split_once("start-up: ")) {
            out.extend(phases(line.1)?.into_iter().map(|figure| (name, figure)));
        }
        out.extend(tax::figures(&self.steps, sample)?);
        Ok(out)
    }
}

/// The phases in the ledger's line.
fn phases(line: &str) -> Result<Vec<Figure>> {
    let number = |text: Option<&str>, what: &str| -> Result<f64> {
        let number = text.and_then(|text| text.split_whitespace().next()).and_then(|word| word.parse().ok());
        number.with_context(|| format!("the ledger's line 'start-up' does not say '{what}'"))
    };
    let mut out = Vec::new();
    for phase in ["mmap", "fault and zero", "pin", "map", "vCPU"] {
        let after = line.split([',', ':', ';']).find_map(|part| part.trim().strip_prefix(phase)?.strip_prefix(' '));
        out.push(Figure::new(&format!("of it {phase}"), "ms", Better::Lower, number(after, phase)?));
    }
    let (ready, huge) = line.split_once(" MiB ready, ").unzip();
    let ready = ready.and_then(|text| text.rsplit(' ').next());
    out.push(Figure::new("ready", "MiB", Better::Higher, number(ready, "MiB ready")?));
    out.push(Figure::new("huge at the start", "MiB", Better::Higher, number(huge, "of them huge")?));
    Ok(out)
}

/// What a guest says of its memory.
pub fn total(text: &str) -> Result<Vec<Figure>> {
    let line =
        text.lines().find_map(|line| line.trim().strip_prefix("total ")).context("the guest did not say its memory")?;
    let kib: f64 = line.split_whitespace().next().and_then(|word| word.parse().ok()).context("no amount of memory")?;
    Ok(vec![Figure::new("MemTotal at the end", "MiB", Better::Higher, kib / 1024.0)])
}

/// Lines under the table: rates and starts beside QEMU's, what pinning is of a start, and what is won where memory comes later.
pub fn beside_qemu(rows: &[Row]) -> Vec<String> {
    const OURS: &str = "tare-vfio";
    const THEIRS: &str = "qemu-vfio";
    let get = |workload: &str, metric: &str, subject: &str| {
        rows.iter().find(|row| row.workload == workload && row.metric == metric)?.median.get(subject).copied()
    };
    let mut out = Vec::new();
    for (start, _, workloads) in KINDS {
        let mut parts: Vec<String> = rows
            .iter()
            .filter(|row| {
                workloads.contains(&row.workload.as_str()) && row.better == Better::Higher && row.metric != "events"
            })
            .filter_map(|row| {
                let ratio = row.median.get(OURS)? / row.median.get(THEIRS)?;
                Some(format!("{} ({}) {ratio:.2}", row.workload, row.metric))
            })
            .collect();
        if let (Some(ours), Some(theirs)) = (get(start, USER_SPACE, OURS), get(start, USER_SPACE, THEIRS)) {
            parts.insert(0, format!("{start}: {USER_SPACE} {:.2}", ours / theirs));
        }
        if !parts.is_empty() {
            out.push(format!("{OURS} over {THEIRS}: {}.", parts.join(", ")));
        }
        if let (Some(pin), Some(fault)) = (get(start, "of it pin", OURS), get(start, "of it fault and zero", OURS)) {
            out.push(format!("{start}: pinning took {:.1} % of what faults and zeroing did.", pin / fault * 100.0));
        }
    }
    let later = "tare-vfio-background";
    for whole in [OURS, "tare-vfio-touch", THEIRS] {
        let seconds = |subject: &str| get(LARGE, USER_SPACE, subject);
        let memory = |subject: &str| get("memory, 8 GiB", "MemTotal at the end", subject);
        if let (Some(now), Some(before)) = (seconds(later), seconds(whole)) {
            let memory = match (memory(later), memory(whole)) {
                (Some(ours), Some(theirs)) => format!("; it ends with {ours:.0} MiB, the other with {theirs:.0} MiB"),
                _ => String::new(),
            };
            out.push(format!(
                "{LARGE}: {later} reaches user space {:.1} times sooner than {whole}{memory}.",
                before / now
            ));
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REPORT: &str = "%% mark 2050000 ready\n%% mark 2060000 begin grown\n%% mark 2070000 end grown\n%% mark 2080000 out grown\n\
        %% mark 2090000 done\n%% end 2300000 exit 0\n%% console\n@@lab ready\n@@lab begin grown\n@@lab end grown\n\
        total 8139680 KiB\n@@lab out grown\n@@lab done\n%% stderr\nLEDGER\n%% stop\n";
    const LINE: &str = "  start-up: prealloc background by 1 threads: mmap 0.25 ms, fault and zero 1500.50 ms (0.7 GiB/s), \
        pin 40.00 ms, map 0.10 ms, vCPU 2.00 ms; 8192 MiB ready, 1022 of them huge; devices by container";

    #[test]
    fn a_start_has_its_phases_and_the_guest_says_what_it_has() {
        let all = bundles(0.1);
        let Kind::Handed(handed) = &all[4].kind else { unreachable!() };
        let sample = |ledger: &str| Sample::parse(&REPORT.replace("LEDGER", ledger)).unwrap();
        let figures = handed.figures(all[4].name, &sample(LINE)).unwrap();
        let get = |metric: &str| figures.iter().find(|(_, f)| f.metric == metric).map(|(_, f)| f.value);
        assert_eq!((get(USER_SPACE), get("of it mmap"), get("of it map")), (Some(2.05), Some(0.25), Some(0.1)));
        assert_eq!(
            (get("of it fault and zero"), get("of it pin"), get("of it vCPU")),
            (Some(1500.5), Some(40.0), Some(2.0))
        );
        assert_eq!((get("ready"), get("huge at the start")), (Some(8192.0), Some(1022.0)));
        assert_eq!(get("MemTotal at the end").map(f64::round), Some(7949.0));
        // QEMU says nothing of its phases.
        assert_eq!(handed.figures(all[4].name, &sample("")).unwrap().len(), 2);
        assert!(handed.figures(all[4].name, &sample("start-up: prealloc off; 1 MiB")).is_err());
    }

    #[test]
    fn every_kind_of_page_has_its_part() {
        let all = bundles(1.0);
        let text = format!("{all:?}");
        for part in
            ["pages: \"4K\"", "pages: \"thp\"", "pages: \"2M\"", "pages: \"1G\"", "--verify=crc32c", "--reverse"]
        {
            assert!(text.contains(part), "{part}");
        }
        let Kind::Handed(handed) = &all[2].kind else { unreachable!() };
        let prepare = handed.prepare("/s", "/d", 1024);
        for part in ["PAGES='2M'", "HANDED='0000:01:00.0 0000:02:00.0'", "MIB='1024'", "ADDRESS='10.0.6.1'"] {
            assert!(prepare.contains(part), "{part} in {prepare}");
        }
        assert!(handed.qemu_memory().ends_with("hugetlbsize=2M"));
    }
}
