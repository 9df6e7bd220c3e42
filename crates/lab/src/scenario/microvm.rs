// SPDX-License-Identifier: Apache-2.0
//! Suite `microvm`: the published study of StratoVirt against QEMU, a table each, like with like: one kernel, one initrd, one
//! root and one marker for all. Boots by the guest's own account, the memory of a monitor with a 1 GiB guest, and sysbench:
//! cpu by threads, memory by block size and order, fileio by mode, once through the guest's page cache as the study did and
//! once with `O_DIRECT`, where the disk is.
//!
//! `--scale` shortens times in proportion, with a number of events as in suite `tax`; the files stay at the study's 20 MiB.

use anyhow::{Context, Result};

use super::{Bundle, Kind, Step};
use crate::report::{Better, Figure};
use crate::sample::Sample;
use crate::sysbench::Test;

/// What the first process of a guest writes into the kernel's log when it begins, and when its file systems are there.
pub const SHELL: &str = "lab-shell";
/// See [`SHELL`].
pub const USER: &str = "lab-user";
/// Files of the fileio tests, together 20 MiB.
const FILES: &str = "--file-num=16 --file-total-size=20M";

/// The bundles of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let part = |full: f64, least: f64| (full * scale).round().max(least) as u64;
    let length = |events: f64, least: f64| {
        let seconds = part(10.0, 1.0);
        if scale < 1.0 {
            format!("--time={seconds} --events={}", part(events, least))
        } else {
            format!("--time={seconds}")
        }
    };
    let limit_seconds = 30 + 20 * part(10.0, 1.0);
    let bundle = |name, steps, memory_mib| Bundle {
        name,
        kind: Kind::Work(steps),
        memory_mib,
        limit_seconds,
        disk: None,
        net: None,
    };
    let step = |(workload, mark), test, command| Step { workload, mark, test, command, after: "" };

    let phases = step(("boot phases", "phases"), Test::Phases, format!("dmesg|grep -e Run./init -e {SHELL} -e {USER}"));
    let cpu = [
        ("cpu, 1 thread", "cpu1", 1),
        ("cpu, 4 threads", "cpu4", 4),
        ("cpu, 16 threads", "cpu16", 16),
        ("cpu, 32 threads", "cpu32", 32),
        ("cpu, 64 threads", "cpu64", 64),
    ]
    .map(|(workload, mark, threads)| {
        let command = format!("sysbench cpu --cpu-max-prime=20000 --threads={threads} {} run", length(1500.0, 64.0));
        step((workload, mark), Test::Cpu, command)
    });
    let memory = [
        ("memory, 1k sequential", "seq1", "1K", "seq"),
        ("memory, 2k sequential", "seq2", "2K", "seq"),
        ("memory, 4k sequential", "seq4", "4K", "seq"),
        ("memory, 8k sequential", "seq8", "8K", "seq"),
        ("memory, 1k random", "rnd1", "1K", "rnd"),
        ("memory, 2k random", "rnd2", "2K", "rnd"),
        ("memory, 4k random", "rnd4", "4K", "rnd"),
        ("memory, 8k random", "rnd8", "8K", "rnd"),
    ]
    .map(|(workload, mark, block, order)| {
        let mib = part(512.0, 4.0);
        let command = format!(
            "sysbench memory --threads=4 --memory-block-size={block} --memory-total-size={mib}M --memory-access-mode={order} run"
        );
        step((workload, mark), Test::Memory, command)
    });
    let mut out = vec![
        Bundle {
            name: "memory 1 GiB",
            kind: Kind::Boot { quiet: false, words: "" },
            memory_mib: 1024,
            limit_seconds: 30,
            disk: None,
            net: None,
        },
        bundle("phases", vec![phases], 1024),
        bundle("cpu", cpu.to_vec(), 512),
        bundle("memory", memory.to_vec(), 512),
    ];
    for (name, threads, block, test, direct, names) in FILEIO {
        let flags = if direct { "--file-extra-flags=direct " } else { "" };
        let prepare = step((names[0], "prepare"), Test::Prepare, format!("sysbench fileio {FILES} prepare"));
        let modes = names[1..].iter().zip(["rndrd", "rndwr", "seqrd", "seqwr"]).map(|(workload, mode)| {
            let options = format!("--threads={threads} --file-block-size={block} --file-test-mode={mode} {flags}");
            step((*workload, mode), test, format!("sysbench fileio {FILES} {options}{} run", length(10_000.0, 200.0)))
        });
        out.push(bundle(name, std::iter::once(Step { after: "sync", ..prepare }).chain(modes).collect(), 512));
    }
    out
}

/// The fileio bundles: name, threads, block, what counts, past the page cache or not, and the names of the workloads: to
/// make the files, then random reads and writes, sequential reads and writes.
type FileIo = (&'static str, u32, &'static str, Test, bool, [&'static str; 5]);

macro_rules! fileio {
    ($($name:literal, $threads:literal, $block:literal, $test:ident, $direct:literal;)*) => {
        [$((
            $name, $threads, $block, Test::$test, $direct,
            [
                concat!($name, ": prepare"),
                concat!($name, ": random read"),
                concat!($name, ": random write"),
                concat!($name, ": sequential read"),
                concat!($name, ": sequential write"),
            ],
        )),*]
    };
}

const FILEIO: [FileIo; 6] = fileio! {
    "latency cached", 1, "4K", FileLatency, false;
    "throughput cached", 32, "128K", FileIo, false;
    "iops cached", 32, "4K", FileIops, false;
    "latency direct", 1, "4K", FileLatency, true;
    "throughput direct", 32, "128K", FileIo, true;
    "iops direct", 32, "4K", FileIops, true;
};

/// The phases of a boot: what the guest's log says of its own time, and the rest, which is the monitor's and the kernel's
/// before its clock runs (unpacking included). `text` is what the step printed.
///
/// # Errors
/// A line that is missing.
pub fn phases(text: &str, sample: &Sample) -> Result<Vec<Figure>> {
    let at = |what: &str| -> Result<f64> {
        // A line that says so, and not the one with the kernel's command line, which has the words too.
        let of = |line: &str| {
            let (seconds, said) = line.split_once('[')?.1.split_once("] ")?;
            said.starts_with(what).then(|| seconds.trim().parse().ok())?
        };
        text.lines().find_map(of).with_context(|| format!("no '{what}' with a time in the log"))
    };
    let (init, shell, user) = (at("Run /init")?, at(SHELL)?, at(USER)?);
    let total = sample.need("begin phases")?.micros as f64 / 1e6;
    let figure = |name: &str, seconds: f64| Figure::new(name, "s", Better::Lower, seconds);
    let mut out = vec![
        figure("total", total),
        figure("monitor and early kernel", (total - user).max(0.0)),
        figure("kernel", init),
        figure("initrd", shell - init),
        figure("user space", user - shell),
    ];
    if let Some(exits) = sample.exits(None, "begin phases") {
        out.push(Figure::new("exits", "", Better::Lower, exits.total as f64));
    }
    Ok(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_study_has_all_its_tables() {
        let text = format!("{:?}", bundles(1.0));
        for threads in [1, 4, 16, 32, 64] {
            assert!(text.contains(&format!("--threads={threads} --time=10 run")), "{threads}");
        }
        for part in [
            "--threads=4 --memory-block-size=2K --memory-total-size=512M --memory-access-mode=rnd",
            "--threads=32 --file-block-size=128K --file-test-mode=seqwr --file-extra-flags=direct --time=10",
            "--threads=1 --file-block-size=4K --file-test-mode=rndrd --time=10",
            "memory_mib: 1024",
        ] {
            assert!(text.contains(part), "{part}");
        }
        let names = super::super::workloads(&bundles(1.0));
        assert_eq!(names.len(), 1 + 1 + 5 + 8 + 6 * 5);
        assert!(names.contains(&"iops direct: sequential read".to_owned()));
        assert!(!text.contains("--events"));
        assert!(format!("{:?}", bundles(0.1)).contains("--time=1 --events=1000"));
    }

    #[test]
    fn phases_come_from_the_guests_log() {
        let text = "%% mark 2500000 begin phases exits=30\n%% mark 2600000 end phases exits=40\n%% mark 2700000 out phases\n\
            %% end 3000000 exit 0\n%% console\n@@lab begin phases\n@@lab end phases\n[    0.000000] Command line: a lab-shell b lab-user\r\n[    0.700000] Run /init as init process\r\n\
            [    1.900000] lab-shell\r\n[    2.100000] lab-user\r\n@@lab out phases\n%% stderr\n\n%% stop\n";
        let sample = Sample::parse(text).unwrap();
        let figures = phases(sample.section("phases").unwrap(), &sample).unwrap();
        let get = |name: &str| figures.iter().find(|f| f.metric == name).unwrap().value;
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(get("total"), 2.5) && near(get("kernel"), 0.7) && near(get("initrd"), 1.2));
        assert!(near(get("user space"), 0.2) && near(get("monitor and early kernel"), 0.4) && near(get("exits"), 30.0));
        assert!(phases("nothing", &sample).unwrap_err().to_string().contains("Run /init"));
    }
}
