// SPDX-License-Identifier: Apache-2.0
//! The description of one virtual machine. Every field is a key of `vm.toml` and a flag of `tare run`.
//!
//! Filled by the command line, read by `machine`. Plain data: [`Vm::check`](crate::Vm::check) says whether it makes sense.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::text::{maybe_size, maybe_size32, on_off, said, said_each};
use crate::{Coalesce, CpuModel, CpuPin, Cpus, DisableExits, Memory, Net, Vfio};

/// One virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Vm {
    /// Kernel: bzImage, ELF or multiboot 1.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line; `None` lets tare choose one that fits the console and the first disk.
    #[serde(default)]
    pub cmdline: Option<String>,
    /// Who unpacks a compressed kernel.
    #[serde(default)]
    pub kernel_decompress: KernelDecompress,
    /// How the guest comes to what is not unpacked: an ELF kernel, a plain initrd.
    #[serde(default)]
    pub kernel_load: KernelLoad,
    /// Virtual CPUs.
    #[serde(default, deserialize_with = "said")]
    pub cpus: Cpus,
    /// What they can do.
    #[serde(default)]
    pub cpu: CpuModel,
    /// Which host CPUs their threads run on.
    #[serde(default, skip_serializing_if = "CpuPin::is_none")]
    pub cpu_pin: CpuPin,
    /// Nanoseconds for which a vCPU that halts polls before its thread sleeps; `None` is KVM's choice for all machines.
    #[serde(default)]
    pub halt_poll: Option<u32>,
    /// What an idle vCPU does without leaving the guest.
    #[serde(default)]
    pub disable_exits: DisableExits,
    /// Guest memory.
    #[serde(default, deserialize_with = "said")]
    pub memory: Memory,
    /// Disks, in the order the guest sees them.
    #[serde(default, rename = "disk", deserialize_with = "said_each")]
    pub disks: Vec<Disk>,
    /// Network devices, in the order the guest sees them.
    #[serde(default, rename = "net", deserialize_with = "said_each")]
    pub nets: Vec<Net>,
    /// Devices of the host that the guest gets.
    #[serde(default, deserialize_with = "said_each", skip_serializing_if = "Vec::is_empty")]
    pub vfio: Vec<Vfio>,
    /// What the guest talks to the user through.
    #[serde(default)]
    pub console: Console,
    /// How the guest finds its virtio devices.
    #[serde(default)]
    pub transport: Transport,
    /// How the guest reads the registers of virtio devices that are no PCI functions.
    #[serde(default)]
    pub mmio_status: MmioStatus,
    /// Where the interrupt chips are.
    #[serde(default)]
    pub irqchip: Irqchip,
    /// A paravirtual interrupt controller, and how the guest reaches its registers.
    #[serde(default)]
    pub vioapic: Option<Vioapic>,
    /// An entropy device fed from the host's `getrandom`.
    #[serde(default = "yes", deserialize_with = "on_off")]
    pub rng: bool,
    /// First of four ports whose write ends the machine with the exit status that the guest asks for.
    #[serde(default)]
    pub debug_exit: Option<u16>,
    /// Where the ledger goes: `-` prints a table to standard error, a path gets JSON.
    #[serde(default)]
    pub ledger: Option<PathBuf>,
    /// KVM's device node.
    #[serde(default = "dev_kvm")]
    pub kvm: PathBuf,
}

fn yes() -> bool {
    true
}

fn dev_kvm() -> PathBuf {
    PathBuf::from("/dev/kvm")
}

impl Vm {
    /// A machine that boots `kernel`, with the default of every other field.
    #[must_use]
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        Self {
            kernel: kernel.into(),
            initrd: None,
            cmdline: None,
            kernel_decompress: KernelDecompress::default(),
            kernel_load: KernelLoad::default(),
            cpus: Cpus::default(),
            cpu: CpuModel::default(),
            cpu_pin: CpuPin::default(),
            halt_poll: None,
            disable_exits: DisableExits::default(),
            memory: Memory::default(),
            disks: Vec::new(),
            nets: Vec::new(),
            vfio: Vec::new(),
            console: Console::default(),
            transport: Transport::default(),
            mmio_status: MmioStatus::default(),
            irqchip: Irqchip::default(),
            vioapic: None,
            rng: yes(),
            debug_exit: None,
            ledger: None,
            kvm: dev_kvm(),
        }
    }
}

/// Who unpacks a compressed (bzImage) kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelDecompress {
    /// The kernel's own stub, inside the guest.
    Guest,
    /// The monitor, before the guest starts, where the compression is one it knows: quicker, and the guest touches less memory.
    #[default]
    Monitor,
}

/// How kernel and initrd, where nothing has to be unpacked, get into guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelLoad {
    /// Their bytes are read into it: huge pages stay whole, and the files may change afterwards.
    #[default]
    Copy,
    /// Their whole pages are mapped, where files and memory allow it: machines share the host's pages of them until they write.
    Map,
}

/// One virtio disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The image or block device.
    pub path: PathBuf,
    /// Said, never probed.
    #[serde(default)]
    pub format: DiskFormat,
    /// The guest may not write.
    #[serde(default, deserialize_with = "on_off")]
    pub readonly: bool,
    /// How the host's page cache is used.
    #[serde(default)]
    pub cache: Cache,
    /// How requests reach the host kernel.
    #[serde(default)]
    pub aio: Aio,
    /// Serial number shown to the guest, at most 20 bytes of ASCII.
    #[serde(default)]
    pub serial: Option<String>,
    /// Bytes for the mapping tables of each qcow2 image; `None` covers the disk, up to 32 MiB.
    #[serde(default, rename = "l2-cache", deserialize_with = "maybe_size")]
    pub l2_cache: Option<u64>,
    /// How a write that allocates a qcow2 cluster treats what is around its data.
    #[serde(default)]
    pub cow: Cow,
    /// How it gets zeroes into the file.
    #[serde(default)]
    pub zeros: Zeros,
    /// Which other files a qcow2 image may name.
    #[serde(default)]
    pub backing: Backing,
    /// Files with the passphrases of the chain's encrypted images, from the top down; the last one opens the rest.
    #[serde(default)]
    pub key: Paths,
    /// Request queues; `None` is one for each vCPU, at most [`DEFAULT_QUEUES`](crate::DEFAULT_QUEUES).
    #[serde(default)]
    pub queues: Option<u16>,
    /// Who serves them.
    #[serde(default)]
    pub threads: DiskThreads,
    /// Bytes of a block as the guest addresses them; `None` is what the host wants.
    #[serde(default, rename = "logical-block-size", deserialize_with = "maybe_size32")]
    pub logical_block_size: Option<u32>,
    /// Bytes of the smallest write that rewrites nothing beside it; `None` is what the host says.
    #[serde(default, rename = "physical-block-size", deserialize_with = "maybe_size32")]
    pub physical_block_size: Option<u32>,
    /// Rate limits.
    #[serde(default, deserialize_with = "said")]
    pub throttle: Throttle,
    /// How long interrupts wait for further requests to finish; `None` is not at all.
    #[serde(default)]
    pub coalesce: Option<Coalesce>,
}

impl Disk {
    /// A writable raw disk at `path` with the default of every other field.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: DiskFormat::default(),
            readonly: false,
            cache: Cache::default(),
            aio: Aio::default(),
            serial: None,
            l2_cache: None,
            cow: Cow::default(),
            zeros: Zeros::default(),
            backing: Backing::default(),
            key: Paths::default(),
            queues: None,
            threads: DiskThreads::default(),
            logical_block_size: None,
            physical_block_size: None,
            throttle: Throttle::default(),
            coalesce: None,
        }
    }
}

/// Rate limits of a disk, over all its queues: a token bucket each for bytes and for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Throttle {
    /// Bytes a second that are read and written; `None` is no limit.
    #[serde(deserialize_with = "maybe_size")]
    pub bps: Option<u64>,
    /// Bytes that may go at once after a pause; `None` is a tenth of `bps`.
    #[serde(deserialize_with = "maybe_size")]
    pub bps_burst: Option<u64>,
    /// Requests a second, of all kinds; `None` is no limit.
    pub iops: Option<u64>,
    /// Requests that may go at once after a pause; `None` is a tenth of `iops`.
    pub iops_burst: Option<u64>,
}

/// Who serves a disk's queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskThreads {
    /// A thread for each queue.
    #[default]
    PerQueue,
    /// One thread for all of them.
    Shared,
}

/// Image formats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The bytes of the disk, one to one.
    #[default]
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

/// What a write that allocates a cluster does around its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cow {
    /// Always writes the whole cluster.
    Explicit,
    /// Writes nothing where nothing was ever allocated.
    Unallocated,
    /// Writes nothing, or zeroes cheaply, wherever the range reads as zeroes.
    #[default]
    ZeroAware,
}

/// How zeroes get into a cluster that is new to the disk and not to the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Zeros {
    /// As a short measurement of the file system says.
    #[default]
    Auto,
    /// In one write with the data.
    Write,
    /// By `fallocate`, beside the data.
    Fallocate,
}

/// Which other files an image may name. In text one of the words, or paths with a colon between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// None.
    None,
    /// Files in the image's folder and below it.
    #[default]
    Folder,
    /// Any.
    Any,
    /// These.
    Listed(Paths),
}

/// Several paths. In text with a colon between them; in `vm.toml` a list will do too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Paths(pub Vec<PathBuf>);

/// Cache modes, with QEMU's names and meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Through the host's page cache; a guest flush reaches the medium.
    #[default]
    Writeback,
    /// Past the host's page cache (`O_DIRECT`); a guest flush reaches the medium.
    None,
    /// Through the host's page cache; guest flushes are not passed on.
    Unsafe,
}

/// How requests reach the host kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// io_uring where the kernel has it, else threads.
    #[default]
    Auto,
    /// io_uring or fail.
    IoUring,
    /// A few threads making plain system calls.
    Threads,
}

/// Where the interrupt chips are. Local APICs are always KVM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Irqchip {
    /// The I/O APIC is tare's, with only the pins that are used, and there is no PIC: a guest that sets up each pin at boot
    /// leaves less often. PCI configuration space is read from pages, too. KVM's chips where KVM can't do that.
    #[default]
    Split,
    /// KVM's I/O APIC of 24 pins and its PIC.
    Kernel,
}

/// How a guest reads registers of a virtio device that is no PCI function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MmioStatus {
    /// Each read leaves to the monitor.
    #[default]
    Trap,
    /// From a read-only page: interrupt status, features, configuration and its generation, without leaving.
    RoPage,
}

/// How a guest reaches the registers of the paravirtual interrupt controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vioapic {
    /// Each access leaves to the monitor.
    Trap,
    /// Reads are loads from a read-only page, writes leave.
    RoPage,
    /// Masks, unmaskings and acknowledgements are stores into a page, and a doorbell.
    Pv,
}

/// The guest's console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// virtio-console, `hvc0`.
    #[default]
    Virtio,
    /// A 16550 at port 0x3f8, `ttyS0`.
    Serial,
    /// None; the guest's output is lost.
    None,
}

/// What virtio devices are to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// PCI functions with MSI-X.
    #[default]
    Pci,
    /// Pages of registers with an interrupt line each, announced in the ACPI tables and on the command line; no PCI bus.
    Mmio,
}
