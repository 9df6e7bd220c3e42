// SPDX-License-Identifier: Apache-2.0
//! Subjects: what is put on the scale. A subject is a name and a command template, so any monitor can be added
//! from the command line as `NAME=TEMPLATE`; the built-in ones are templates too.
//!
//! A template is split into words like a shell would (quotes, backslash), then `{variables}` are filled in, so a value
//! never splits or quotes anything. A group `[--disk path={disk}]` is dropped when a variable in it has no value.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// The variables a template may use, with what they stand for; shown by `tare-lab list`.
pub const VARIABLES: &[(&str, &str)] = &[
    ("kernel", "path of the guest kernel (a stock bzImage)"),
    ("initrd", "path of the guest's initial RAM disk; unset when a workload needs none"),
    ("disk", "path of the guest's root disk, a raw image; unset when a workload needs none"),
    ("qcow2", "path of the second disk of suite fileio, a fresh qcow2 image on a backing file; unset elsewhere"),
    ("raw", "path of a raw file that holds the same, made instead for templates that name it"),
    ("mac", "address of the NIC of suite net; unset elsewhere"),
    ("tap", "name of a tap with a virtio header, made for templates that name it; unset elsewhere"),
    ("passt", "path of the socket of a passt, started for templates that name it; unset elsewhere"),
    (
        "load_initrd",
        "path of the initrd with the driver of the paravirtual interrupt controller before it; unset when a workload needs none",
    ),
    ("handed_disk", "PCI address of the host's NVMe disk that the guest of suite passthrough gets; unset elsewhere"),
    ("handed_card", "that of the network card; unset where the guest gets the disk alone"),
    ("pages", "the pages of its memory, as in tare's pages=; unset elsewhere"),
    ("qemu_memory", "the same as an object of QEMU's, without id and size"),
    ("cmdline", "the whole kernel command line, one word"),
    ("cmdline_json", "the same, escaped for the inside of a JSON string"),
    ("memory_mib", "guest memory in MiB"),
    ("cpus", "number of virtual CPUs"),
    ("console", "'serial' or 'virtio'; a template without it is taken to have a serial console on its standard output"),
    ("scratch", "an empty directory of this sample, removed afterwards"),
    ("tare", "path of the tare binary"),
];

const TARE: &str = "{tare} run --kernel {kernel} [--initrd {initrd}] --cmdline {cmdline} --cpus {cpus} \
    --memory {memory_mib}M [--disk path={disk},cache=writeback] --console {console} --no-rng";
const TARE_MMIO: &str = "{tare} run --kernel {kernel} [--initrd {initrd}] --cmdline {cmdline} --cpus {cpus} \
    --memory {memory_mib}M [--disk path={disk},cache=writeback] --console {console} --no-rng --transport mmio";
const QEMU: &str = "qemu-system-x86_64 -M pc -nodefaults -no-user-config -display none -enable-kvm -cpu host -smp {cpus} \
    -m {memory_mib} -kernel {kernel} [-initrd {initrd}] -append {cmdline} \
    [-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=root] \
    -serial stdio -no-reboot";
/// tare's template with the second disk of suite `fileio`; elsewhere it is the one without.
macro_rules! tare_with {
    ($disk:literal) => {
        concat!(
            "{tare} run --kernel {kernel} [--initrd {initrd}] --cmdline {cmdline} --cpus {cpus} --memory {memory_mib}M ",
            "[--disk path={disk},cache=writeback] [--disk path=",
            $disk,
            ",cache=writeback] --console {console} --no-rng"
        )
    };
}

/// The same of QEMU's.
macro_rules! qemu_with {
    ($disk:literal) => {
        concat!(
            "qemu-system-x86_64 -M pc -nodefaults -no-user-config -display none -enable-kvm -cpu host -smp {cpus} ",
            "-m {memory_mib} -kernel {kernel} [-initrd {initrd}] -append {cmdline} ",
            "[-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=root] ",
            "[-drive file=",
            $disk,
            ",if=none,id=data,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=data] -serial stdio -no-reboot"
        )
    };
}

/// tare's template with the NIC of suite `net`; elsewhere it is the one without.
macro_rules! tare_net {
    ($net:literal) => {
        concat!(
            "{tare} run --kernel {kernel} [--initrd {initrd}] --cmdline {cmdline} --cpus {cpus} --memory {memory_mib}M ",
            "[--disk path={disk},cache=writeback] [--net ",
            $net,
            ",mac={mac}] --console {console} --no-rng"
        )
    };
}

/// The same of QEMU's.
macro_rules! qemu_net {
    ($backend:literal, $device:literal) => {
        concat!(
            "qemu-system-x86_64 -M pc -nodefaults -no-user-config -display none -enable-kvm -cpu host -smp {cpus} ",
            "-m {memory_mib} -kernel {kernel} [-initrd {initrd}] -append {cmdline} ",
            "[-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=root] ",
            "[-netdev ",
            $backend,
            ",id=net -device virtio-net-pci,netdev=net,mac={mac}",
            $device,
            "] -serial stdio -no-reboot"
        )
    };
}

const TARE_USER: &str = tare_net!("user,mtu=65520");
const TARE_TAP: &str = tare_net!("tap,tap={tap}");
const TARE_VHOST: &str = tare_net!("tap,tap={tap},vhost=on");
const QEMU_USER: &str = qemu_net!("stream,server=off,addr.type=unix,addr.path={passt}", ",host_mtu=65520");
const QEMU_TAP: &str = qemu_net!("tap,ifname={tap},script=no,downscript=no", "");
const QEMU_VHOST: &str = qemu_net!("tap,ifname={tap},script=no,downscript=no,vhost=on", "");
const TARE_RAW: &str = tare_with!("{raw}");
const TARE_EXPLICIT: &str = tare_with!("{qcow2},format=qcow2,cow=explicit");
const TARE_UNALLOCATED: &str = tare_with!("{qcow2},format=qcow2,cow=unallocated");
const TARE_ZERO_AWARE: &str = tare_with!("{qcow2},format=qcow2,cow=zero-aware");
const QEMU_RAW: &str = qemu_with!("{raw},format=raw");
const QEMU_QCOW2: &str = qemu_with!("{qcow2},format=qcow2");
const QEMU_MICROVM: &str = "qemu-system-x86_64 -M microvm,pcie=on -nodefaults -no-user-config -display none -enable-kvm \
    -cpu host -smp {cpus} -m {memory_mib} -kernel {kernel} [-initrd {initrd}] -append {cmdline} \
    [-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=root] \
    -serial stdio -no-reboot";
const CLOUD_HYPERVISOR: &str = "cloud-hypervisor --kernel {kernel} [--initramfs {initrd}] --cmdline {cmdline} \
    --cpus boot={cpus} --memory size={memory_mib}M [--disk path={disk},image_type=raw] --serial tty --console off";
const FIRECRACKER: &str = r#"sh -c "cat >{scratch}/fc.json <<'END'
{\"boot-source\": {\"kernel_image_path\": \"{kernel}\", \"initrd_path\": \"{initrd}\", \"boot_args\": \"{cmdline_json}\"},
 \"drives\": [], \"machine-config\": {\"vcpu_count\": {cpus}, \"mem_size_mib\": {memory_mib}}}
END
exec firecracker --no-api --config-file {scratch}/fc.json""#;

/// tare with the guest of suite `irq-load`.
macro_rules! tare_load {
    ($initrd:literal, $word:literal, $flags:literal) => {
        concat!(
            "{tare} run --kernel {kernel} [--initrd ",
            $initrd,
            "] --cmdline \"",
            $word,
            "{cmdline}\" --cpus {cpus} --memory {memory_mib}M [--disk path={disk},cache=writeback] ",
            "[--disk path={raw},cache=writeback] [--net tap,tap={tap},mac={mac}] --console {console} --no-rng ",
            $flags
        )
    };
}

/// The same of QEMU's: its devices on pins of the I/O APIC, not on messages.
macro_rules! qemu_load {
    ($irqchip:literal) => {
        concat!(
            "qemu-system-x86_64 -M pc,kernel-irqchip=",
            $irqchip,
            " -nodefaults -no-user-config -display none -enable-kvm -cpu host -smp {cpus} ",
            "-m {memory_mib} -kernel {kernel} [-initrd {initrd}] -append {cmdline} ",
            "[-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring ",
            "-device virtio-blk-pci,drive=root,vectors=0] ",
            "[-drive file={raw},format=raw,if=none,id=data,cache=writeback,aio=io_uring ",
            "-device virtio-blk-pci,drive=data,vectors=0] ",
            "[-netdev tap,ifname={tap},script=no,downscript=no,id=net -device virtio-net-pci,netdev=net,mac={mac},vectors=0] ",
            "-serial stdio -no-reboot"
        )
    };
}

const LOAD_TRAP: &str = tare_load!("{load_initrd}", "vioapic_flow=level ", "--transport mmio --vioapic trap");
const LOAD_TRAP_FASTEOI: &str = tare_load!("{load_initrd}", "vioapic_flow=fasteoi ", "--transport mmio --vioapic trap");
const LOAD_RO_PAGE: &str = tare_load!("{load_initrd}", "vioapic_flow=level ", "--transport mmio --vioapic ro-page");
const LOAD_PV: &str = tare_load!("{load_initrd}", "vioapic_flow=level ", "--transport mmio --vioapic pv");
const LOAD_PV_FASTEOI: &str = tare_load!("{load_initrd}", "vioapic_flow=fasteoi ", "--transport mmio --vioapic pv");
const LOAD_PV_STATUS: &str =
    tare_load!("{load_initrd}", "vioapic_flow=fasteoi ", "--transport mmio --vioapic pv --mmio-status ro-page");
const LOAD_SPLIT: &str = tare_load!("{initrd}", "", "--transport mmio --irqchip split");
const LOAD_KERNEL: &str = tare_load!("{initrd}", "", "--transport mmio --irqchip kernel");
const LOAD_MSI: &str = tare_load!("{initrd}", "", "--irqchip split");
const LOAD_QEMU_SPLIT: &str = qemu_load!("split");
const LOAD_QEMU_KERNEL: &str = qemu_load!("on");

/// tare with the guest of suite `interrupts`.
macro_rules! tare_interrupts {
    ($controller:literal, $flags:literal) => {
        concat!(
            "{tare} run --kernel {kernel} --cmdline \"{cmdline} controller=",
            $controller,
            "\" --memory {memory_mib}M --console serial --no-rng ",
            $flags
        )
    };
}

/// The same of QEMU's.
macro_rules! qemu_interrupts {
    ($irqchip:literal) => {
        concat!(
            "qemu-system-x86_64 -M pc,kernel-irqchip=",
            $irqchip,
            " -nodefaults -no-user-config -display none -enable-kvm -cpu host -m {memory_mib} -kernel {kernel} ",
            "-append \"{cmdline} controller=ioapic\" -serial stdio -no-reboot"
        )
    };
}

/// tare with what the guest of suite `passthrough` is given.
macro_rules! tare_vfio {
    ($prealloc:literal, $card:literal) => {
        concat!(
            "{tare} run --kernel {kernel} [--initrd {initrd}] --cmdline {cmdline} --cpus {cpus} --memory size={memory_mib}M,pages={pages},",
            $prealloc,
            " [--disk path={disk},cache=writeback] --vfio {handed_disk} ",
            $card,
            "--console {console} --no-rng --ledger -"
        )
    };
}

const TARE_VFIO: &str = tare_vfio!("prealloc=parallel", "[--vfio {handed_card}] ");
const TARE_VFIO_TOUCH: &str = tare_vfio!("prealloc=touch", "");
const TARE_VFIO_BACKGROUND: &str = tare_vfio!("prealloc=background,boot=512M", "");
const QEMU_VFIO: &str = "qemu-system-x86_64 -M q35,memory-backend=ram -nodefaults -no-user-config -display none -enable-kvm \
    -cpu host -smp {cpus} -m {memory_mib} -object {qemu_memory},id=ram,size={memory_mib}M,prealloc=on,prealloc-threads={cpus} \
    -kernel {kernel} [-initrd {initrd}] -append {cmdline} \
    [-drive file={disk},format=raw,if=none,id=root,cache=writeback,aio=io_uring -device virtio-blk-pci,drive=root] \
    -device vfio-pci,host={handed_disk} [-device vfio-pci,host={handed_card}] -serial stdio -no-reboot";

const TARE_TRAP: &str = tare_interrupts!("vioapic", "--vioapic trap");
const TARE_RO_PAGE: &str = tare_interrupts!("vioapic", "--vioapic ro-page");
const TARE_PV: &str = tare_interrupts!("vioapic", "--vioapic pv");
const TARE_SPLIT: &str = tare_interrupts!("ioapic", "--irqchip split");
const TARE_KERNEL: &str = tare_interrupts!("ioapic", "--irqchip kernel");
const TARE_MSI: &str = tare_interrupts!("message", "--irqchip split");
const QEMU_SPLIT: &str = qemu_interrupts!("split");
const QEMU_KERNEL: &str = qemu_interrupts!("on");
const STRATOVIRT: &str = "stratovirt -machine microvm -kernel {kernel} [-initrd {initrd}] -append {cmdline} -smp {cpus} \
    -m {memory_mib}m -serial stdio -disable-seccomp";

/// The built-in subjects: name, what it is, template. `native` has no monitor.
pub const BUILT_IN: &[(&str, &str, &str)] = &[
    ("native", "the workload on the host itself, no monitor", ""),
    ("tare", "this project's monitor", TARE),
    ("tare-mmio", "the same with virtio devices as registers instead of PCI functions", TARE_MMIO),
    ("qemu", "QEMU with KVM, machine type pc, virtio-blk (writeback, io_uring)", QEMU),
    ("qemu-microvm", "QEMU with KVM, machine type microvm", QEMU_MICROVM),
    ("cloud-hypervisor", "Cloud Hypervisor, when its binary is there", CLOUD_HYPERVISOR),
    ("tare-raw", "tare with the second disk of suite fileio as a raw file", TARE_RAW),
    ("tare-explicit", "tare with it as qcow2; a write that allocates fills its cluster (cow=explicit)", TARE_EXPLICIT),
    ("tare-unallocated", "the same, but where nothing was ever allocated (cow=unallocated)", TARE_UNALLOCATED),
    ("tare-zero-aware", "the same, but where the disk reads as zeroes (cow=zero-aware, the default)", TARE_ZERO_AWARE),
    ("qemu-raw", "QEMU with the second disk of suite fileio as a raw file", QEMU_RAW),
    ("qemu-qcow2", "QEMU with it as qcow2", QEMU_QCOW2),
    ("tare-user", "tare with the NIC of suite net on passt", TARE_USER),
    ("tare-tap", "tare with it on a tap", TARE_TAP),
    ("tare-vhost", "tare with it on a tap that vhost-net serves", TARE_VHOST),
    ("qemu-user", "QEMU with the NIC of suite net on passt", QEMU_USER),
    ("qemu-tap", "QEMU with it on a tap", QEMU_TAP),
    ("qemu-vhost", "QEMU with it on a tap that vhost-net serves", QEMU_VHOST),
    ("tare-trap", "tare, suite interrupts: the paravirtual controller, each register access an exit", TARE_TRAP),
    ("tare-ro-page", "the same, registers read from a page", TARE_RO_PAGE),
    ("tare-pv", "the same, masks and acknowledgements stored into a page", TARE_PV),
    ("tare-split", "tare, suite interrupts: its own I/O APIC", TARE_SPLIT),
    ("tare-kernel", "tare, suite interrupts: KVM's I/O APIC", TARE_KERNEL),
    ("tare-msi", "tare, suite interrupts: the message alone, no controller to ask", TARE_MSI),
    ("qemu-split", "QEMU, suite interrupts: its own I/O APIC", QEMU_SPLIT),
    ("qemu-kernel", "QEMU, suite interrupts: KVM's I/O APIC", QEMU_KERNEL),
    (
        "load-trap",
        "tare, suite irq-load: disks and NIC on the paravirtual controller, each register access an exit",
        LOAD_TRAP,
    ),
    ("load-trap-fasteoi", "the same; the guest's driver only ends an interrupt's service", LOAD_TRAP_FASTEOI),
    ("load-ro-page", "as load-trap, registers read from a page", LOAD_RO_PAGE),
    ("load-pv", "as load-trap, masks and acknowledgements stored into a page", LOAD_PV),
    ("load-pv-fasteoi", "the same; the guest's driver only ends an interrupt's service", LOAD_PV_FASTEOI),
    ("load-pv-status", "as load-pv-fasteoi, and the devices' registers read from pages, too", LOAD_PV_STATUS),
    ("load-split", "tare, suite irq-load: pins of its own I/O APIC", LOAD_SPLIT),
    ("load-kernel", "tare, suite irq-load: pins of KVM's I/O APIC", LOAD_KERNEL),
    ("load-msi", "tare, suite irq-load: MSI-X", LOAD_MSI),
    ("load-qemu-split", "QEMU, suite irq-load: pins of its own I/O APIC", LOAD_QEMU_SPLIT),
    ("load-qemu-kernel", "QEMU, suite irq-load: pins of KVM's I/O APIC", LOAD_QEMU_KERNEL),
    ("tare-vfio", "tare with devices of the host, all memory ready first, by a thread for each vCPU", TARE_VFIO),
    ("tare-vfio-touch", "the same by one thread, touching pages (start of 8 GiB only)", TARE_VFIO_TOUCH),
    (
        "tare-vfio-background",
        "512 MiB ready first, the rest plugged while the guest runs (start of 8 GiB only)",
        TARE_VFIO_BACKGROUND,
    ),
    ("qemu-vfio", "QEMU with devices of the host, all memory ready first, by a thread for each vCPU", QEMU_VFIO),
    ("stratovirt", "StratoVirt, when its binary is there (boot only: no root disk in its template)", STRATOVIRT),
    ("firecracker", "Firecracker, when its binary is there (boot only: no root disk in its template)", FIRECRACKER),
];

/// A guest's console, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// A 16550 at 0x3f8: one exit a character.
    Serial,
    /// A virtio console.
    Virtio,
}

impl Console {
    /// The device of the kernel's `console=` argument.
    pub fn device(self) -> &'static str {
        match self {
            Console::Serial => "ttyS0",
            Console::Virtio => "hvc0",
        }
    }

    /// The value of `{console}` in a template.
    pub fn word(self) -> &'static str {
        match self {
            Console::Serial => "serial",
            Console::Virtio => "virtio",
        }
    }
}

/// One subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Short name, the key in every table.
    pub name: String,
    /// The command template as written; empty for native.
    pub template: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    words: Vec<String>,
    optional: bool,
}

impl Subject {
    /// Reads one entry of `--subjects`: a built-in name or `NAME=TEMPLATE`.
    pub fn parse(text: &str) -> Result<Self> {
        if let Some((name, _, template)) = BUILT_IN.iter().find(|(name, ..)| *name == text) {
            return Self::new(name, template);
        }
        let Some((name, template)) = text.split_once('=') else {
            let known: Vec<_> = BUILT_IN.iter().map(|(name, ..)| *name).collect();
            bail!("subject '{text}' is not built in; use one of {} or NAME=COMMAND TEMPLATE", known.join(", "));
        };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            bail!("subject name '{name}': use letters, digits, '-', '_' and '.'");
        }
        if template.trim().is_empty() {
            bail!("subject '{name}' has an empty command template; see 'tare-lab list' for the variables");
        }
        Self::new(name, template)
    }

    fn new(name: &str, template: &str) -> Result<Self> {
        let parts = parts(template).with_context(|| format!("command template of subject '{name}'"))?;
        Ok(Self { name: name.to_owned(), template: template.to_owned(), parts })
    }

    /// True for the subject without a monitor.
    pub fn is_native(&self) -> bool {
        self.parts.is_empty()
    }

    /// The console this subject uses when it may choose: virtio where its template can switch, else serial.
    pub fn own_console(&self) -> Console {
        if self.template.contains("{console}") { Console::Virtio } else { Console::Serial }
    }

    /// The program the template starts, with `{tare}` left as it is; `None` for native.
    pub fn program(&self) -> Option<&str> {
        let first = self.parts.first()?.words.first()?;
        if first == "sh" {
            // `sh -c "… exec PROGRAM …"`: the last exec names it.
            let script = self.parts.first()?.words.last()?;
            let (_, after) = script.rsplit_once("exec ")?;
            return after.split_whitespace().next();
        }
        Some(first)
    }

    /// Whether the template mentions variable `name`.
    pub fn wants(&self, name: &str) -> bool {
        self.template.contains(&format!("{{{name}}}"))
    }

    /// Fills the template in. Errors when a variable outside a group has no value.
    pub fn command(&self, values: &BTreeMap<&str, String>) -> Result<Vec<String>> {
        let mut out = Vec::new();
        for part in &self.parts {
            let filled: Result<Vec<String>, &str> = part.words.iter().map(|word| fill(word, values)).collect();
            match filled {
                Ok(words) => out.extend(words),
                Err(_) if part.optional => {}
                Err(name) => {
                    bail!("subject '{}' needs {{{name}}} but this workload has none: put it in a [group]", self.name)
                }
            }
        }
        Ok(out)
    }
}

/// Reads the values of all `--subjects` flags. Each is a list split at commas, but a comma inside a template belongs to the
/// template: only a built-in name, or `NAME=` before something that is clearly a program, starts the next entry. A template
/// that would be misread gets a flag of its own.
pub fn parse_list(flags: &[impl AsRef<str>]) -> Result<Vec<Subject>> {
    let mut entries: Vec<String> = Vec::new();
    for flag in flags {
        let mut in_template = false;
        for piece in flag.as_ref().split(',') {
            let built_in = BUILT_IN.iter().any(|(name, ..)| *name == piece);
            match entries.last_mut() {
                Some(last) if in_template && !built_in && !starts_template(piece) => {
                    last.push(',');
                    last.push_str(piece);
                }
                _ => {
                    in_template = piece.contains('=');
                    entries.push(piece.to_owned());
                }
            }
        }
    }
    let subjects: Vec<Subject> = entries.iter().map(|entry| Subject::parse(entry)).collect::<Result<_>>()?;
    for (i, subject) in subjects.iter().enumerate() {
        if subjects[..i].iter().any(|other| other.name == subject.name) {
            bail!("subject '{}' is named twice", subject.name);
        }
    }
    Ok(subjects)
}

/// True for `NAME=PROGRAM ...` where PROGRAM is a path, a variable or a program of this host.
fn starts_template(piece: &str) -> bool {
    let Some((name, rest)) = piece.split_once('=') else { return false };
    let program = rest.split_whitespace().next().unwrap_or("");
    let named = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    named && rest.contains(' ') && (program.starts_with(['/', '{']) || crate::facts::installed(program))
}

/// Splits a template into words and bracketed groups, checking that each variable is known.
fn parts(template: &str) -> Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut optional = false;
    for mut word in words(template)? {
        let mut opens = false;
        if !optional && word.starts_with('[') {
            optional = true;
            opens = true;
            word.remove(0);
        }
        let closes = optional && word.ends_with(']');
        if closes {
            word.pop();
        }
        if let Some(name) = variables(&word).find(|name| !VARIABLES.iter().any(|(known, _)| known == name)) {
            bail!("unknown variable {{{name}}}; 'tare-lab list' names them all");
        }
        match parts.last_mut() {
            Some(part) if !opens && part.optional == optional => part.words.push(word),
            _ => parts.push(Part { words: vec![word], optional }),
        }
        if closes {
            optional = false;
            parts.push(Part { words: Vec::new(), optional: false });
        }
    }
    if optional {
        bail!("a [group] is not closed");
    }
    parts.retain(|part| !part.words.is_empty());
    Ok(parts)
}

/// Shell-like word splitting: single and double quotes, backslash.
fn words(text: &str) -> Result<Vec<String>> {
    let mut out = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => out.extend(word.take()),
            (None | Some('"'), '\\') => match chars.next() {
                Some(next) => word.get_or_insert_default().push(next),
                None => bail!("ends in a backslash"),
            },
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if let Some(q) = quote {
        bail!("a quote {q} is not closed");
    }
    out.extend(word);
    Ok(out)
}

/// Names of the `{variables}` in a word; braces around anything but `a-z0-9_` are plain text (JSON).
fn variables(word: &str) -> impl Iterator<Item = &str> {
    word.match_indices('{').filter_map(|(at, _)| {
        let rest = &word[at + 1..];
        let name = &rest[..rest.find('}')?];
        (!name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
            .then_some(name)
    })
}

/// Replaces the variables of one word; `Err` names the first one without a value.
fn fill<'w>(word: &'w str, values: &BTreeMap<&str, String>) -> Result<String, &'w str> {
    let mut out = String::new();
    let mut rest = word;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        match variables(&rest[at..]).next().filter(|name| rest[at + 1..].starts_with(name)) {
            Some(name) => {
                out.push_str(values.get(name).ok_or(name)?);
                rest = &rest[at + name.len() + 2..];
            }
            None => {
                out.push('{');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn values(pairs: &[(&'static str, &str)]) -> BTreeMap<&'static str, String> {
        pairs.iter().map(|(k, v)| (*k, (*v).to_owned())).collect()
    }

    const BASE: &[(&str, &str)] = &[
        ("kernel", "/k"),
        ("cmdline", "console=ttyS0 -- -c \"a b\""),
        ("cmdline_json", "console=ttyS0"),
        ("memory_mib", "256"),
        ("cpus", "1"),
        ("console", "virtio"),
        ("scratch", "/s"),
        ("tare", "/bin/tare"),
    ];

    #[test]
    fn tare_template_with_and_without_a_disk() {
        let subject = Subject::parse("tare").unwrap();
        assert_eq!(
            subject.command(&values(BASE)).unwrap(),
            [
                "/bin/tare",
                "run",
                "--kernel",
                "/k",
                "--cmdline",
                "console=ttyS0 -- -c \"a b\"",
                "--cpus",
                "1",
                "--memory",
                "256M",
                "--console",
                "virtio",
                "--no-rng",
            ]
        );
        let mut with = values(BASE);
        with.insert("disk", "/d.raw".into());
        let command = subject.command(&with).unwrap();
        assert!(command.windows(2).any(|w| w == ["--disk", "path=/d.raw,cache=writeback"]), "{command:?}");
        assert_eq!(subject.own_console(), Console::Virtio);
        assert_eq!(subject.program(), Some("{tare}"));
    }

    #[test]
    fn every_built_in_template_parses_and_fills() {
        let mut all = values(BASE);
        for (name, value) in [
            ("disk", "/d"),
            ("initrd", "/i"),
            ("qcow2", "/q"),
            ("raw", "/r"),
            ("handed_disk", "0000:01:00.0"),
            ("pages", "2M"),
            ("qemu_memory", "m"),
        ] {
            all.insert(name, value.into());
        }
        for (name, ..) in BUILT_IN {
            let subject = Subject::parse(name).unwrap();
            let command = subject.command(&all).unwrap();
            assert_eq!(command.is_empty(), subject.is_native());
            assert!(command.iter().all(|word| !word.contains("{kernel}")), "{command:?}");
            let second = command.iter().filter(|word| word.contains("=/q,") || word.contains("=/r,")).count();
            let wants = subject.wants("qcow2") || subject.wants("raw");
            assert_eq!(second, usize::from(wants), "{command:?}");
        }
    }

    #[test]
    fn firecracker_template_makes_json() {
        let mut all = values(BASE);
        all.insert("initrd", "/i".into());
        let command = Subject::parse("firecracker").unwrap().command(&all).unwrap();
        let script = &command[2];
        let json = script.split_once('\n').unwrap().1.split_once("END\n").unwrap().0;
        let parsed: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(parsed["boot-source"]["initrd_path"], "/i");
        assert_eq!(parsed["machine-config"]["mem_size_mib"], 256);
        assert_eq!(Subject::parse("firecracker").unwrap().program(), Some("firecracker"));
    }

    #[test]
    fn list_splits_at_commas_but_not_inside_templates() {
        let list = parse_list(&[
            "native,mine=vmm --disk path={disk},readonly=on -m {memory_mib},qemu,b=/bin/x --y {kernel}",
            "c=x,y -z {kernel}",
        ])
        .unwrap();
        let names: Vec<_> = list.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["native", "mine", "qemu", "b", "c"]);
        assert_eq!(list[1].template, "vmm --disk path={disk},readonly=on -m {memory_mib}");
        assert_eq!(list[4].template, "x,y -z {kernel}");
    }

    #[test]
    fn bad_subjects_say_what_to_do() {
        for (text, part) in [
            ("qemuu", "NAME=COMMAND TEMPLATE"),
            ("x=", "empty command template"),
            ("x=vmm {kernal}", "unknown variable {kernal}"),
            ("x=vmm 'a", "not closed"),
            ("x=vmm [a {disk}", "not closed"),
            ("a b=vmm", "letters, digits"),
            ("native,native", "named twice"),
        ] {
            let error = format!("{:#}", parse_list(&[text]).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
        let needs_disk = Subject::parse("x=vmm {disk}").unwrap();
        let error = needs_disk.command(&values(BASE)).unwrap_err().to_string();
        assert!(error.contains("needs {disk}"), "{error}");
    }

    #[test]
    fn words_follow_shell_rules() {
        assert_eq!(words(r#"a 'b c' "d \"e" f\ g"#).unwrap(), ["a", "b c", "d \"e", "f g"]);
        assert_eq!(words("  ''  ").unwrap(), [""]);
    }
}
