// SPDX-License-Identifier: Apache-2.0
//! The flags of `tare run` as typed: one table yields the parser, the help and the keys of `vm.toml`.
//!
//! [`Typed`] is what was said, on the command line or in the file, each thing perhaps not at all; `meaning` turns it into
//! what it means. A table instead of a parser generator keeps a monitor that lives beside each guest small, and every
//! complaint on one line.

use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use lexopt::{Arg, Parser};
use serde::Deserialize;
use spec::{
    Console, CpuModel, CpuPin, Cpus, DisableExits, Disk, FromText, Irqchip, KernelDecompress, KernelLoad, Memory,
    MmioStatus, Net, Said, SpecError, Transport, Vfio, Vioapic, Word, parse_on_off, parse_port,
};

use crate::exit::Failure;

/// What `tare run` was told. `None` is "not said".
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Typed {
    /// `--kernel`
    pub kernel: Option<PathBuf>,
    /// `--initrd`
    pub initrd: Option<PathBuf>,
    /// `--cmdline`
    pub cmdline: Option<String>,
    /// `--disk`, in order.
    pub disk: Option<Vec<Said<Disk>>>,
    /// `--net`, in order.
    pub net: Option<Vec<Said<Net>>>,
    /// `--vfio`, in order.
    pub vfio: Option<Vec<Said<Vfio>>>,
    /// `--cpus`
    pub cpus: Option<Said<Cpus>>,
    /// `--cpu`
    pub cpu: Option<CpuModel>,
    /// `--cpu-pin`
    pub cpu_pin: Option<CpuPin>,
    /// `--halt-poll`
    pub halt_poll: Option<u32>,
    /// `--disable-exits`
    pub disable_exits: Option<DisableExits>,
    /// `--memory`
    pub memory: Option<Said<Memory>>,
    /// `--console`
    pub console: Option<Console>,
    /// `--transport`
    pub transport: Option<Transport>,
    /// `--mmio-status`
    pub mmio_status: Option<MmioStatus>,
    /// `--irqchip`
    pub irqchip: Option<Irqchip>,
    /// `--vioapic`
    pub vioapic: Option<Vioapic>,
    /// `--no-rng` is `Some(false)`.
    pub rng: Option<bool>,
    /// `--kernel-decompress`
    pub kernel_decompress: Option<KernelDecompress>,
    /// `--kernel-load`
    pub kernel_load: Option<KernelLoad>,
    /// `--on-reset`
    pub on_reset: Option<OnReset>,
    /// `--debug-exit`
    pub debug_exit: Option<u16>,
    /// `--ledger`
    pub ledger: Option<PathBuf>,
    /// `--pidfile`
    pub pidfile: Option<PathBuf>,
    /// `--api`
    pub api: Option<PathBuf>,
    /// `--kvm`
    pub kvm: Option<PathBuf>,
}

/// A command line: what was typed, and the flags that are no keys of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// What was typed.
    pub typed: Typed,
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--explain`
    pub explain: bool,
    /// `--symbols`
    pub symbols: Option<PathBuf>,
}

impl From<Typed> for Line {
    fn from(typed: Typed) -> Self {
        Self { typed, ..Self::default() }
    }
}

impl Deref for Line {
    type Target = Typed;

    fn deref(&self) -> &Typed {
        &self.typed
    }
}

impl DerefMut for Line {
    fn deref_mut(&mut self) -> &mut Typed {
        &mut self.typed
    }
}

/// What a guest's reset does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReset {
    /// The machine starts again, as real ones do.
    #[default]
    Restart,
    /// The monitor ends.
    Exit,
}

impl Word for OnReset {
    const WHAT: &'static str = "something a reset can do";
    const WORDS: &'static [(&'static str, Self)] = &[("restart", Self::Restart), ("exit", Self::Exit)];
}

/// One flag.
struct Flag {
    /// After `--`, and the key in `vm.toml`; only `no-rng` (`rng = false`), `config`, `explain` and `symbols` are no keys.
    name: &'static str,
    /// What the value is called in the help; `None` for a switch.
    value: Option<&'static str>,
    /// Its lines in the help; none hides the flag.
    help: &'static [&'static str],
    /// Stores the value; a switch gets an empty one.
    set: fn(&mut Line, OsString) -> Result<(), SpecError>,
}

const FLAGS: &[Flag] = &[
    Flag {
        name: "kernel",
        value: Some("FILE"),
        help: &[
            "kernel to boot: Linux bzImage (vmlinuz) or ELF (vmlinux), or a",
            "multiboot 1 kernel, such as those of kvm-unit-tests",
        ],
        set: |t, v| put(&mut t.kernel, "kernel", v.into()),
    },
    Flag {
        name: "initrd",
        value: Some("FILE"),
        help: &["initial RAM disk"],
        set: |t, v| put(&mut t.initrd, "initrd", v.into()),
    },
    Flag {
        name: "cmdline",
        value: Some("TEXT"),
        help: &[
            "kernel command line, all of it; without this flag tare chooses",
            "console=..., root=/dev/vda rw (with a disk), reboot=k panic=-1 and",
            "cryptomgr.notests (no self-tests of the kernel's cryptography:",
            "half of a boot).",
            "For an image with partitions say root=/dev/vda1 here",
        ],
        set: |t, v| put(&mut t.cmdline, "cmdline", utf8("cmdline", v)?),
    },
    Flag {
        name: "disk",
        value: Some("DISK"),
        help: &[
            "a virtio disk; give it again for more. A path, or a group:",
            "path=FILE[,readonly=on|off][,cache=writeback|none|unsafe]",
            "[,aio=auto|io_uring|threads][,serial=TEXT][,format=raw|qcow2]",
            "[,l2-cache=SIZE][,cow=zero-aware|unallocated|explicit]",
            "[,zeros=auto|write|fallocate]",
            "[,backing=folder|none|any|PATH:PATH...][,key=FILE:FILE...]",
            "[,queues=N][,threads=per-queue|shared]",
            "[,logical-block-size=SIZE][,physical-block-size=SIZE]",
            "[,bps=SIZE][,bps-burst=SIZE][,iops=N][,iops-burst=N]",
            "[,coalesce=MICROSECONDS:REQUESTS];",
            "queues: one for each vCPU, at most 4, unless said;",
            "bps, iops: bytes and requests a second over all queues;",
            "coalesce: an interrupt waits so long, or for so many requests;",
            "a comma in the path is written `,,`",
        ],
        set: |t, v| {
            t.disk.get_or_insert_default().push(Said(Disk::from_text(&utf8("disk", v)?)?));
            Ok(())
        },
    },
    Flag {
        name: "net",
        value: Some("NET"),
        help: &[
            "a virtio network device; give it again for more:",
            "user[,fd=N] is passt, started by tare (N: a socket to one),",
            "tap,tap=NAME or tap,fd=N[:M...] a tap; then [,mac=ADDRESS][,mtu=N]",
            "[,coalesce=MICROSECONDS:PACKETS] (as of a disk)",
        ],
        set: |t, v| {
            t.net.get_or_insert_default().push(Said(Net::from_text(&utf8("net", v)?)?));
            Ok(())
        },
    },
    Flag {
        name: "vfio",
        value: Some("ADDRESS"),
        help: &[
            "a PCI device of the host that the guest gets, such as 0000:03:00.0;",
            "give it again for more (`tare passthrough` makes it ready);",
            "[,iommu=iommufd|container] the way behind the IOMMU [auto]",
        ],
        set: |t, v| {
            t.vfio.get_or_insert_default().push(Said(Vfio::from_text(&utf8("vfio", v)?)?));
            Ok(())
        },
    },
    Flag {
        name: "cpus",
        value: Some("N"),
        help: &[
            "virtual CPUs, 1 to 64 [1]: N[,sockets=S][,cores=C][,threads=T],",
            "whose product is N; what is left out follows, cores first",
        ],
        set: |t, v| put(&mut t.cpus, "cpus", Said(Cpus::from_text(&utf8("cpus", v)?)?)),
    },
    Flag {
        name: "cpu",
        value: Some("MODEL"),
        help: &[
            "host: all that KVM gives; then -NAME takes a feature away, +NAME",
            "insists on one: host,-avx512f,+x2apic. `tare doctor` lists names",
        ],
        set: |t, v| put(&mut t.cpu, "cpu", CpuModel::from_text(&utf8("cpu", v)?)?),
    },
    Flag {
        name: "cpu-pin",
        value: Some("LIST"),
        help: &[
            "host CPUs for the vCPUs' threads: a list with one for each (2-5),",
            "or pairs VCPU:CPU for some (0:2,1:4-5)",
        ],
        set: |t, v| put(&mut t.cpu_pin, "cpu-pin", CpuPin::from_text(&utf8("cpu-pin", v)?)?),
    },
    Flag {
        name: "halt-poll",
        value: Some("NS"),
        help: &[
            "how long a vCPU that halts polls before its thread sleeps, in ns;",
            "costs the host a busy CPU for so long each time, 0 nothing",
            "[KVM's own, for all machines]",
        ],
        set: |t, v| put(&mut t.halt_poll, "halt-poll", nanoseconds("halt-poll", v)?),
    },
    Flag {
        name: "disable-exits",
        value: Some("LIST"),
        help: &[
            "hlt,pause,mwait,cstate: what a vCPU does without leaving the guest.",
            "hlt and mwait cost the host a CPU for each idle vCPU, pause the",
            "time a vCPU spins; tare says so at the start, the ledger at the end",
        ],
        set: |t, v| put(&mut t.disable_exits, "disable-exits", DisableExits::from_text(&utf8("disable-exits", v)?)?),
    },
    Flag {
        name: "memory",
        value: Some("SIZE"),
        help: &[
            "guest memory with K, M, G or T [256M]; then",
            "[,backing=anonymous|memfd|file][,path=FILE][,pages=thp|4K|2M|1G]",
            "[,fallback=on|off][,shared=on|off][,ksm=on|off][,host-node=N]",
            "[,prealloc=off|touch|populate|parallel|vcpu|background|pool]",
            "[,prealloc-threads=N][,pool=SOCKET][,hotplug=SIZE][,boot=SIZE]",
            "[,nodes=N][,host-nodes=A:B:...];",
            "2M and 1G are pages that the host has set aside; prealloc: when",
            "memory is made to exist, by whom; pool: see `tare memory-pool`;",
            "hotplug: what `tare ctl resize-memory` may add; boot: with",
            "prealloc=background, what is there at once: the rest is plugged",
            "as it becomes ready; nodes: NUMA nodes of the guest, which share",
            "its memory and CPUs, and of the host, one for each",
        ],
        set: |t, v| put(&mut t.memory, "memory", Said(Memory::from_text(&utf8("memory", v)?)?)),
    },
    Flag {
        name: "console",
        value: Some("KIND"),
        help: &["virtio (hvc0), serial (ttyS0) or none [virtio]"],
        set: |t, v| put(&mut t.console, "console", word("console", v)?),
    },
    Flag {
        name: "transport",
        value: Some("KIND"),
        help: &["virtio devices as pci functions or as mmio registers [pci]"],
        set: |t, v| put(&mut t.transport, "transport", word("transport", v)?),
    },
    Flag {
        name: "mmio-status",
        value: Some("HOW"),
        help: &["how mmio registers are read: each by an exit or from a page;", "trap or ro-page [trap]"],
        set: |t, v| put(&mut t.mmio_status, "mmio-status", word("mmio-status", v)?),
    },
    Flag {
        name: "irqchip",
        value: Some("WHERE"),
        help: &["the I/O APIC: tare's, with the pins in use, or KVM's;", "split or kernel [split]"],
        set: |t, v| put(&mut t.irqchip, "irqchip", word("irqchip", v)?),
    },
    Flag {
        name: "vioapic",
        value: Some("MODE"),
        help: &["a paravirtual interrupt controller (docs/vioapic.md);", "trap, ro-page or pv [none]"],
        set: |t, v| put(&mut t.vioapic, "vioapic", word("vioapic", v)?),
    },
    Flag {
        name: "no-rng",
        value: None,
        help: &["no virtio entropy device (rng = false in vm.toml)"],
        set: |t, _| put(&mut t.rng, "no-rng", false),
    },
    Flag {
        name: "rng",
        value: Some("on|off"),
        help: &[],
        set: |t, v| put(&mut t.rng, "rng", parse_on_off("rng", &utf8("rng", v)?)?),
    },
    Flag {
        name: "kernel-decompress",
        value: Some("WHERE"),
        help: &["who unpacks a bzImage: monitor or guest [monitor]"],
        set: |t, v| put(&mut t.kernel_decompress, "kernel-decompress", word("kernel-decompress", v)?),
    },
    Flag {
        name: "kernel-load",
        value: Some("HOW"),
        help: &[
            "an ELF kernel and a plain initrd: copy, or map them so that",
            "machines share the host's pages [copy]",
        ],
        set: |t, v| put(&mut t.kernel_load, "kernel-load", word("kernel-load", v)?),
    },
    Flag {
        name: "on-reset",
        value: Some("WHAT"),
        help: &["when the guest resets itself: restart or exit [restart]"],
        set: |t, v| put(&mut t.on_reset, "on-reset", word("on-reset", v)?),
    },
    Flag {
        name: "debug-exit",
        value: Some("PORT"),
        help: &[
            "a write of N there ends the machine with exit status 2N+1, as",
            "QEMU's isa-debug-exit does; kvm-unit-tests need 0xf4 [none]",
        ],
        set: |t, v| put(&mut t.debug_exit, "debug-exit", parse_port("debug-exit", &utf8("debug-exit", v)?)?),
    },
    Flag {
        name: "ledger",
        value: Some("FILE"),
        help: &[
            "where the run's weight goes: JSON to FILE, or - for a table on",
            "standard error; the last start's after a restart",
        ],
        set: |t, v| put(&mut t.ledger, "ledger", v.into()),
    },
    Flag {
        name: "pidfile",
        value: Some("FILE"),
        help: &["keeps the monitor's process id there while it runs"],
        set: |t, v| put(&mut t.pidfile, "pidfile", v.into()),
    },
    Flag {
        name: "api",
        value: Some("SOCKET"),
        help: &[
            "serves an HTTP API there while the machine runs, for the owner",
            "alone; `tare ctl --api SOCKET` is its client",
        ],
        set: |t, v| put(&mut t.api, "api", v.into()),
    },
    Flag {
        name: "config",
        value: Some("FILE"),
        help: &[
            "reads a vm.toml whose keys are the flags above (disk is an array);",
            "paths in it are relative to it, and flags go before it",
        ],
        set: |t, v| put(&mut t.config, "config", v.into()),
    },
    Flag {
        name: "explain",
        value: None,
        help: &[
            "at the end prints the boot as a timeline on standard error: what",
            "each stretch took, and where the exits to tare came from",
        ],
        set: |t, _| {
            t.explain = true;
            Ok(())
        },
    },
    Flag {
        name: "symbols",
        value: Some("FILE"),
        help: &["the guest kernel's System.map or kallsyms, for --explain"],
        set: |t, v| put(&mut t.symbols, "symbols", v.into()),
    },
    Flag { name: "kvm", value: Some("FILE"), help: &[], set: |t, v| put(&mut t.kvm, "kvm", v.into()) },
];

fn put<T>(slot: &mut Option<T>, name: &'static str, value: T) -> Result<(), SpecError> {
    if slot.replace(value).is_some() {
        return Err(SpecError::Repeated { place: "command line".to_owned(), key: format!("--{name}") });
    }
    Ok(())
}

fn utf8(name: &str, value: OsString) -> Result<String, SpecError> {
    value.into_string().map_err(|value| SpecError::NotA {
        place: name.to_owned(),
        value: value.to_string_lossy().into_owned(),
        want: "UTF-8",
        hint: "use a name that is".to_owned(),
    })
}

fn nanoseconds(name: &str, value: OsString) -> Result<u32, SpecError> {
    let text = utf8(name, value)?;
    text.parse().map_err(|_| SpecError::NotA {
        place: name.to_owned(),
        value: text,
        want: "a number of nanoseconds",
        hint: "write a whole number, such as 50000".to_owned(),
    })
}

fn word<T: Word>(name: &str, value: OsString) -> Result<T, SpecError> {
    T::from_word(name, &utf8(name, value)?)
}

/// What a command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked<T> {
    /// The help text.
    Help,
    /// To do this.
    Do(T),
}

/// Reads the flags of `tare run`.
///
/// # Errors
/// [`Failure`] with exit code 2, naming the flag.
pub fn parse_run(args: &mut Parser) -> Result<Asked<Line>, Failure> {
    let mut typed = Line::default();
    while let Some(arg) = args.next().map_err(lexed)? {
        let name = match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long(name) => name.to_owned(),
            Arg::Short(c) => return Err(unknown(&format!("-{c}"), None)),
            Arg::Value(value) => {
                let what = format!("`{}` belongs to no flag: command line", value.to_string_lossy());
                return Err(Failure::usage(format!("{what}; write --kernel FILE, --disk FILE; see `tare run --help`")));
            }
        };
        let Some(flag) = FLAGS.iter().find(|f| f.name == name) else {
            let near = FLAGS.iter().filter(|f| !f.help.is_empty()).find(|f| is_near(f.name, &name));
            return Err(unknown(&format!("--{name}"), near.map(|f| f.name)));
        };
        let value = match flag.value {
            Some(_) => args.value().map_err(lexed)?,
            None => OsString::new(),
        };
        // Errors of values name the bare key; only `Repeated` is about the command line as a whole.
        (flag.set)(&mut typed, value).map_err(|e| match e {
            SpecError::Repeated { ref place, .. } if place == "command line" => e.into(),
            other => Failure::usage(other.under("--")),
        })?;
    }
    Ok(Asked::Do(typed))
}

fn unknown(flag: &str, near: Option<&str>) -> Failure {
    let hint = near.map_or_else(|| "see `tare run --help`".to_owned(), |near| format!("did you mean --{near}?"));
    Failure::usage(format!("unknown flag {flag}: command line; {hint}"))
}

/// The typed name begins like the flag's, or the other way round.
fn is_near(flag: &str, typed: &str) -> bool {
    let (flag, typed) = (flag.trim_end_matches('s'), typed.trim_end_matches('s'));
    let common = flag.bytes().zip(typed.bytes()).take_while(|(a, b)| a == b).count();
    common >= 3 && (common + 2 >= flag.len().min(typed.len()))
}

/// Puts the value of flag `name`, of a command of its own, into `slot`.
pub fn once<T>(slot: &mut Option<T>, name: &str, value: T) -> Result<(), Failure> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(Failure::usage(format!("{name} is given twice: command line; give it once"))),
    }
}

/// The value of flag `name`, which is `what`, such as a name.
pub fn text_of(name: &str, what: &str, args: &mut lexopt::Parser) -> Result<String, Failure> {
    let value = args.value().map_err(lexed)?;
    value
        .into_string()
        .map_err(|v| Failure::usage(format!("`{}` is not UTF-8: {name}; use a {what} that is", v.display())))
}

/// What lexopt found wrong, in this house's form.
pub fn lexed(error: lexopt::Error) -> Failure {
    Failure::usage(match error {
        lexopt::Error::MissingValue { option: Some(flag) } => {
            format!("{flag} has no value: command line; write {flag} VALUE")
        }
        lexopt::Error::UnexpectedValue { option, .. } => format!("{option} takes no value: command line; take it out"),
        other => format!("{other}: command line; see `tare --help`"),
    })
}

/// The flags' part of `tare run --help`.
pub fn help() -> String {
    let mut text = String::new();
    for flag in FLAGS.iter().filter(|f| !f.help.is_empty()) {
        let left = match flag.value {
            Some(value) => format!("--{} {value}", flag.name),
            None => format!("--{}", flag.name),
        };
        for (index, line) in flag.help.iter().enumerate() {
            let left = if index == 0 { left.as_str() } else { "" };
            text.push_str(&format!("  {left:<27} {line}\n"));
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Asked<Line>, Failure> {
        parse_run(&mut Parser::from_args(args))
    }

    fn typed(args: &[&str]) -> Line {
        match parse(args).unwrap() {
            Asked::Do(typed) => typed,
            Asked::Help => panic!("help"),
        }
    }

    #[test]
    fn every_flag_is_a_key() {
        for key in
            FLAGS.iter().map(|f| f.name).filter(|name| !["no-rng", "config", "explain", "symbols"].contains(name))
        {
            let value = match key {
                "disk" => "[\"a\"]",
                "net" => "[\"user\"]",
                "vfio" => "[\"03:00.0\"]",
                "cpus" | "halt-poll" => "1",
                "cpu" => "\"host\"",
                "cpu-pin" => "\"2-5\"",
                "disable-exits" => "\"hlt\"",
                "memory" => "\"1G\"",
                "console" => "\"none\"",
                "transport" => "\"mmio\"",
                "irqchip" => "\"kernel\"",
                "vioapic" | "mmio-status" => "\"ro-page\"",
                "rng" => "false",
                "kernel-decompress" => "\"guest\"",
                "kernel-load" => "\"map\"",
                "on-reset" => "\"exit\"",
                "debug-exit" => "0xf4",
                _ => "\"x\"",
            };
            let read: Typed = toml::from_str(&format!("{key} = {value}")).unwrap();
            assert_ne!(read, Typed::default(), "{key} is stored");
        }
    }

    /// What the file says and what the flags say are the same thing.
    #[test]
    fn flags_and_file_read_alike() {
        let flags = typed(&[
            "--kernel=k",
            "--initrd",
            "i",
            "--cmdline",
            "quiet",
            "--disk",
            "a.raw",
            "--disk=path=b,,c,readonly=on",
            "--net",
            "user",
            "--net=kind=tap,tap=t0,mtu=9000",
            "--vfio=0000:03:00.0",
            "--vfio=04:00.0,iommu=container",
            "--cpus",
            "8,sockets=2,cores=2,threads=2",
            "--cpu",
            "host,-avx512f,-sgx,+x2apic",
            "--cpu-pin",
            "0:2,7:3-4",
            "--halt-poll",
            "50000",
            "--disable-exits=pause,cstate",
            "--memory",
            "1G",
            "--console",
            "serial",
            "--transport",
            "mmio",
            "--mmio-status",
            "ro-page",
            "--vioapic",
            "ro-page",
            "--no-rng",
            "--kernel-decompress",
            "monitor",
            "--kernel-load",
            "copy",
            "--on-reset",
            "exit",
            "--debug-exit",
            "0xf4",
            "--ledger",
            "-",
            "--pidfile",
            "p",
            "--api",
            "s",
            "--kvm",
            "/dev/null",
        ]);
        let file: Typed = toml::from_str(
            r#"
            kernel = "k"
            initrd = "i"
            cmdline = "quiet"
            cpus = { count = 8, sockets = 2, cores = 2, threads = 2 }
            cpu = ["host", "-avx512f", "-sgx", "+x2apic"]
            cpu-pin = ["0:2", "7:3-4"]
            halt-poll = 50000
            disable-exits = ["pause", "cstate"]
            memory = { size = "1G" }
            console = "serial"
            transport = "mmio"
            mmio-status = "ro-page"
            vioapic = "ro-page"
            rng = false
            kernel-decompress = "monitor"
            kernel-load = "copy"
            on-reset = "exit"
            debug-exit = 244
            ledger = "-"
            pidfile = "p"
            api = "s"
            kvm = "/dev/null"
            [[vfio]]
            host = "03:00.0"
            [[vfio]]
            host = "04:00.0"
            iommu = "container"
            [[disk]]
            path = "a.raw"
            [[disk]]
            path = "b,c"
            readonly = true
            [[net]]
            kind = "user"
            [[net]]
            kind = "tap"
            tap = "t0"
            mtu = 9000
            "#,
        )
        .unwrap();
        assert_eq!(flags, Line::from(file));
    }

    #[test]
    fn complaints_name_the_flag() {
        let says = |args: &[&str]| parse(args).unwrap_err().message;
        assert_eq!(says(&["--mem", "1G"]), "unknown flag --mem: command line; did you mean --memory?");
        assert!(says(&["--cpu", "1"]).starts_with("`1` is not a CPU model: --cpu; write host, then -NAME"));
        assert!(says(&["--cpu", "-avx9"]).starts_with("`avx9` is not a CPU feature: --cpu; did you mean avx"));
        assert_eq!(says(&["--cp", "1"]), "unknown flag --cp: command line; see `tare run --help`");
        assert_eq!(says(&["--frobnicate"]), "unknown flag --frobnicate: command line; see `tare run --help`");
        assert_eq!(says(&["-m", "1G"]), "unknown flag -m: command line; see `tare run --help`");
        assert_eq!(says(&["--kernel"]), "--kernel has no value: command line; write --kernel VALUE");
        assert_eq!(says(&["--no-rng=yes"]), "--no-rng takes no value: command line; take it out");
        assert_eq!(says(&["--kernel", "a", "--kernel", "b"]), "`--kernel` is given twice: command line; give it once");
        assert_eq!(
            says(&["--memory", "lots"]),
            "`lots` is not a size: --memory; write a whole number with K, M, G or T, such as 512M"
        );
        assert_eq!(
            says(&["--disk", "a,cache=fast"]),
            "`fast` is not a cache mode: --disk.cache; use writeback, none or unsafe"
        );
        assert_eq!(says(&["--disk", "a,a=b"]).split(';').next(), Some("unknown key `a`: --disk"));
        assert_eq!(says(&["--disk", "a,cache=none,cache=none"]), "`cache` is given twice: --disk; give it once");
        assert_eq!(
            says(&["--halt-poll", "5us"]),
            "`5us` is not a number of nanoseconds: --halt-poll; write a whole number, such as 50000"
        );
        assert!(says(&["--cpu-pin", "a"]).starts_with("`a` is not a host CPU for each vCPU: --cpu-pin; write a list"));
        assert!(
            says(&["--disable-exits", "x"]).starts_with("`x` is not an exit that can be left out: --disable-exits;")
        );
        assert!(says(&["vmlinuz"]).starts_with("`vmlinuz` belongs to no flag"));
        for wrong in ["x", "0x", "-1", "+1", "0x+1", "65536", "0x10000"] {
            assert_eq!(
                says(&["--debug-exit", wrong]),
                format!("`{wrong}` is not a port: --debug-exit; write a number below 65536, such as 0xf4")
            );
        }
        assert_eq!(
            says(&["--on-reset", "stop"]),
            "`stop` is not something a reset can do: --on-reset; use restart or exit"
        );
    }

    #[test]
    fn help_names_every_shown_flag_within_80_columns() {
        let help = help();
        for flag in FLAGS {
            assert_eq!(help.contains(&format!("  --{} ", flag.name)), !flag.help.is_empty(), "{}", flag.name);
        }
        assert!(help.lines().all(|l| l.len() <= 100), "{help}");
        assert_eq!(parse(&["--kernel", "k", "-h"]), Ok(Asked::Help));
    }
}
