// SPDX-License-Identifier: Apache-2.0
//! From a description to a VM that is ready to run: memory, interrupt chips, devices, kernel, vCPUs, in that order.
//!
//! Called once per run, on the main thread, before any other thread exists.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use base::{Gpa, Gsi};
use boot::{Pci, Platform, Serial, Source};
use irq::IrqLine;
use kvm::{
    CpuidEntry, KVM_X86_DISABLE_EXITS_CSTATE, KVM_X86_DISABLE_EXITS_HLT, KVM_X86_DISABLE_EXITS_MWAIT,
    KVM_X86_DISABLE_EXITS_PAUSE, Kvm, Vcpu, Vm,
};
use mem::GuestRam;
use spec::Console;
use virtio::net::VhostMemory;

use crate::bus::Bus;
use crate::console::ConsoleIo;
use crate::control::Control;
use crate::dispatch::Dispatch;
use crate::error::{Error, host};
use crate::hotplug::{Pieces, announce as announce_memory, to_plug};
use crate::ioapic::IoApicHost;
use crate::layout;
use crate::legacy::{AcpiPorts, Coalesced, DebugExit, SerialPort};
use crate::lines::Lines;
use crate::mmio_host::{announce, last_gsi};
use crate::msi::KvmMsi;
use crate::passthrough::{Passthrough, Taken, can_plug};
use crate::pci_hotplug::PciHotplug;
use crate::ready::{self, Later, StartUp};
use crate::registry::Registry;
use crate::spaces::Spaces;
use crate::timeline::Timeline;
use crate::timer::Timer;
use crate::vcpu::affinity::CpuSet;
use crate::vcpu::features::Given;
use crate::vcpu::host::monitor_leaf;
use crate::vcpu::topology::Topology;
use crate::vcpu::{cpuid, setup};
use crate::vioapic::VioapicHost;

/// A VM that is ready to run.
pub struct Built {
    /// The KVM side; its slots point into `ram`.
    pub vm: Vm,
    /// Guest memory; must outlive `vm`'s vCPUs.
    pub ram: GuestRam,
    /// The vCPUs, not yet running.
    pub vcpus: Vec<Vcpu>,
    /// Devices and the way to them.
    pub dispatch: Arc<Dispatch>,
    /// What the main thread keeps of the devices.
    pub registry: Registry,
    /// Fires when half a line of serial output has waited long enough.
    pub timer: Arc<Timer>,
    /// The guest's power button: one edge, one press.
    pub button: Arc<dyn IrqLine>,
    /// What is left to do for the memory.
    pub later: Later,
    /// What took how long so far.
    pub startup: StartUp,
}

/// Builds the VM that `spec` describes; with `remote` so that it can be asked for changes. Its steps go to `timeline`.
///
/// # Errors
/// See [`Error`].
pub fn build(spec: &spec::Vm, io: &ConsoleIo, remote: bool, timeline: &Arc<Timeline>) -> Result<Built, Error> {
    let kvm = Kvm::open(&spec.kvm)?;
    let topology = check_host(spec, &kvm)?;
    let features = choose_features(spec, &kvm)?;
    let debug_exit = spec.debug_exit.map(DebugExit::new).transpose()?;
    let vm = kvm.create_vm()?;
    idle(spec, &vm)?;
    let mut startup = StartUp::default();
    // Before any memory is touched: a device that can't be had is found at once.
    let taken = Taken::open(spec, &vm)?;
    let ram = ready::find(spec, &mut startup)?;
    let later = ready::make(spec, &ram, &mut startup)?;
    let begun = Instant::now();
    let spaces = Spaces::new(&vm, &ram)?;
    startup.map_ns = ready::nanoseconds(begun);
    let hotplug = can_plug(spec, remote);
    let pins = irqchip(spec, &vm, hotplug)?;
    if pins.is_some() {
        spaces.add_ioapic()?;
    }
    spaces.add_ports(spec.console == Console::Serial, debug_exit)?;
    let routes = KvmMsi::new(vm.clone(), pins);
    let ioapic = pins.map(|pins| Arc::new(IoApicHost::new(pins, &routes)));
    timeline.note("virtual machine and its memory");

    let control = Arc::new(Control::new().map_err(host("make an eventfd"))?);
    let timer = Arc::new(Timer::new().map_err(host("make a timer"))?);
    let vioapic = spec.vioapic.map(|mode| VioapicHost::new((&vm, &spaces), mode)).transpose()?.map(Arc::new);
    let mut lines = Lines::new(&vm, ioapic.clone(), vioapic.clone());
    let button = lines.edge(layout::ACPI_EVENT_GSI)?;
    let mut serial = None;
    if spec.console == Console::Serial {
        serial = Some(SerialPort::new(lines.edge(layout::SERIAL_GSI)?, io.output.clone(), timer.clone()));
    }
    let hotplug = hotplug.then(|| lines.edge(layout::PCI_HOTPLUG_GSI)).transpose()?.map(PciHotplug::new);
    let mut bus = Bus::new(spec, &spaces, &ram, (&routes, lines))?;
    if hotplug.is_some() {
        bus.allow_hotplug()?;
    }
    let pieces = Pieces::new(spec, &spaces, &ram)?;
    let reached = Arc::new(VhostMemory::new(&ram));
    if spec.nets.iter().any(|net| net.vhost || !net.vhostfd.0.is_empty()) {
        spaces.follow(reached.listener())?;
    }
    let registry = Registry::populate(spec, &mut bus, io, pieces, &reached, remote)?;
    let passthrough = passthrough(taken, hotplug, (&vm, &spaces, &ram), (&mut bus, &registry))?;
    // `kernel` is the machine without either of what a split one does for fewer exits, so that one can be seen beside the other.
    if spec.irqchip == spec::Irqchip::Split {
        bus.map_config()?;
    }
    timeline.note("devices");
    let loaded = load(spec, topology.apic_ids(), &ram, &bus)?;
    timeline.note("kernel, initrd and tables");
    // Not before: what is loaded may have been put behind the memory, and is pinned with it.
    if let Some(passthrough) = &passthrough
        && passthrough.pin(&mut startup)?
    {
        startup.huge = ready::huge(&ram);
        timeline.note("memory pinned");
    }

    let begun = Instant::now();
    let mut vcpus = Vec::with_capacity(usize::from(spec.cpus.count));
    for index in 0..spec.cpus.count {
        let vcpu = vm.create_vcpu(topology.seat(index).apic_id)?;
        let inputs = cpuid::Inputs { features: &features, topology, tsc_khz: vcpu.tsc_khz() };
        let table = cpuid::table(&inputs, index);
        vcpu.set_cpuid(&table)?;
        setup::extended_state(&vcpu, &table)?;
        setup::msrs(&vcpu, spec.disable_exits.mwait)?;
        vcpu.set_machine_check_banks(1)?;
        vcpus.push(vcpu);
    }
    if let Some(first) = vcpus.first() {
        setup::boot_vcpu(first, &loaded)?;
    }
    if let (Some(port), Some(ring)) = (&mut serial, vcpus.first().and_then(Vcpu::coalesced_ring)) {
        port.coalesce(Coalesced::new(&vm, ring, layout::SERIAL_PORT));
    }
    startup.vcpu_ns = ready::nanoseconds(begun);
    timeline.note("vCPUs");
    let dispatch = Dispatch::new((control, timeline.clone()), (spaces, ram.clone()), serial, bus);
    let dispatch = Arc::new(dispatch.with_ioapic(ioapic).with_vioapic(vioapic).with_passthrough(passthrough));
    Ok(Built { vm, ram, vcpus, dispatch, registry, timer, button, later, startup })
}

/// Puts the devices that were taken on the bus; `None` if there are none and none may come.
fn passthrough(
    taken: Option<Taken>,
    hotplug: Option<PciHotplug>,
    machine: (&Vm, &Spaces, &GuestRam),
    (bus, registry): (&mut Bus, &Registry),
) -> Result<Option<Arc<Passthrough>>, Error> {
    let Some(news) = registry.news().filter(|_| taken.is_some() || hotplug.is_some()) else { return Ok(None) };
    let passthrough = Passthrough::new(machine, news, hotplug)?;
    taken.map_or(Ok(()), |taken| passthrough.join(taken, bus))?;
    Ok(Some(Arc::new(passthrough)))
}

/// Makes the interrupt chips; gives the number of pins of the I/O APIC if that is ours.
fn irqchip(spec: &spec::Vm, vm: &Vm, hotplug: bool) -> Result<Option<u8>, Error> {
    let serial = (spec.console == Console::Serial).then_some(layout::SERIAL_GSI);
    let devices = usize::from(spec.console == Console::Virtio)
        + spec.disks.len()
        + spec.nets.len()
        + usize::from(spec.rng)
        + usize::from(spec.memory.to_plug() > 0);
    let mmio = if spec.transport == spec::Transport::Mmio { last_gsi(devices) } else { None };
    // The last pin of PCI functions lies past the one that says that they come and go.
    let pci = spec.transport == spec::Transport::Pci && (hotplug || !spec.vfio.is_empty());
    let plug = pci.then_some(Gsi(layout::PCI_PIN_GSI.0 + layout::PCI_PINS - 1));
    let last =
        serial.into_iter().chain(mmio).chain(plug).map(|gsi| gsi.0).max().unwrap_or(0).max(layout::ACPI_EVENT_GSI.0);
    let pins = last as u8 + 1;
    if spec.irqchip == spec::Irqchip::Split && vm.split_irqchip(pins)? {
        return Ok(Some(pins));
    }
    vm.create_irqchip()?;
    Ok(None)
}

/// What a vCPU that has nothing to do does, where the user said.
fn idle(spec: &spec::Vm, vm: &Vm) -> Result<(), Error> {
    if let Some(ns) = spec.halt_poll
        && !vm.set_halt_poll(ns)?
    {
        return Err(Error::TooMuch(
            "this host's KVM can't set halt polling for one machine: --halt-poll; take it out, or write \
             /sys/module/kvm/parameters/halt_poll_ns for all machines"
                .to_owned(),
        ));
    }
    let can = vm.exits_to_disable();
    let mut bits = 0;
    for word in spec.disable_exits.words() {
        let bit = match word {
            "hlt" => KVM_X86_DISABLE_EXITS_HLT,
            "pause" => KVM_X86_DISABLE_EXITS_PAUSE,
            "mwait" => KVM_X86_DISABLE_EXITS_MWAIT,
            _ => KVM_X86_DISABLE_EXITS_CSTATE,
        };
        if can & bit == 0 {
            return Err(Error::TooMuch(format!(
                "this host's KVM can't leave out exits of {word}: --disable-exits; take {word} out (`tare doctor` shows \
                 disable_exits={can}, the sum of mwait 1, hlt 2, pause 4 and cstate 8)"
            )));
        }
        bits |= bit;
    }
    if bits != 0 {
        vm.disable_exits(bits)?;
    }
    Ok(())
}

/// Whether this process may run where vCPUs are to be pinned.
fn check_pins(spec: &spec::Vm) -> Result<(), Error> {
    let pins = spec.cpu_pin.pins();
    if pins.is_empty() {
        return Ok(());
    }
    let allowed = CpuSet::allowed().map_err(host("ask which host CPUs may be used"))?;
    match pins
        .into_iter()
        .flat_map(|(vcpu, cpus)| cpus.map(move |cpu| (vcpu, cpu)))
        .find(|(_, c)| !allowed.contains(*c))
    {
        Some((vcpu, cpu)) => Err(Error::TooMuch(format!(
            "vCPU {vcpu} can't be on host CPU {cpu}: --cpu-pin; this process may use {allowed}"
        ))),
        None => Ok(()),
    }
}

/// The features of every vCPU.
fn choose_features(spec: &spec::Vm, kvm: &Kvm) -> Result<Vec<CpuidEntry>, Error> {
    let mwait = spec.disable_exits.mwait.then(monitor_leaf);
    let given = Given::new(kvm.supported_cpuid()?, kvm.has_tsc_deadline(), mwait);
    given.choose(&spec.cpu).map_err(|name| {
        let hint = match name {
            "monitor" => "; add --disable-exits mwait".to_owned(),
            _ => format!("; take +{name} out (`tare doctor` lists what there is)"),
        };
        Error::TooMuch(format!("this host's KVM can't give a guest `{name}`: --cpu{hint}"))
    })
}

/// The names of the CPU features that the KVM whose node is `node` can give a guest.
///
/// # Errors
/// [`Error::Kvm`].
pub fn host_cpu_features(node: &Path) -> Result<Vec<&'static str>, Error> {
    let kvm = Kvm::open(node)?;
    Ok(Given::new(kvm.supported_cpuid()?, kvm.has_tsc_deadline(), None).names())
}

/// What can be told before anything is made; gives the seats of the vCPUs.
fn check_host(spec: &spec::Vm, kvm: &Kvm) -> Result<Topology, Error> {
    let most = kvm.max_vcpus();
    if usize::from(spec.cpus.count) > most {
        return Err(Error::TooMuch(format!(
            "{} vCPUs are more than this host's KVM allows, {most}; ask for fewer with --cpus",
            spec.cpus.count
        )));
    }
    let topology: Topology = spec.cpus.topology().map_err(|e| Error::TooMuch(e.to_string()))?.into();
    let last = topology.apic_ids().last().copied().unwrap_or(0);
    if last as usize >= kvm.max_vcpu_ids() {
        return Err(Error::TooMuch(format!(
            "APIC id {last} of the last vCPU is more than this host's KVM allows, {}: --cpus; ask for fewer, or for cores \
             and threads that are powers of two",
            kvm.max_vcpu_ids() - 1
        )));
    }
    check_pins(spec)?;
    let available = host_memory();
    if available.is_some_and(|have| spec.memory.size > have) {
        return Err(Error::TooMuch(format!(
            "{} MiB of guest memory are more than this host has ({} MiB); ask for less with --memory",
            spec.memory.size >> 20,
            available.unwrap_or(0) >> 20
        )));
    }
    Ok(topology)
}

/// Memory and swap of the host in bytes, from `/proc/meminfo`.
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((field("MemTotal:")? + field("SwapTotal:").unwrap_or(0)) << 10)
}

/// Puts kernel, initrd, command line and tables into guest memory.
fn load(spec: &spec::Vm, apic_ids: Vec<u32>, ram: &GuestRam, bus: &Bus) -> Result<boot::Entry, Error> {
    let serial = Serial { port: layout::SERIAL_PORT, gsi: layout::SERIAL_GSI };
    let to_plug = to_plug(spec);
    let nodes = nodes(&spec.memory, &apic_ids);
    let platform = Platform {
        apic_ids,
        lapic: Gpa(0xfee0_0000),
        ioapic: layout::IOAPIC.0,
        ecam: bus.ecam(),
        conf1: false,
        pci_window32: layout::PCI_WINDOW,
        pci_window64: (layout::high_window(ram), layout::PCI_WINDOW_HIGH),
        pci: Pci {
            ports: Some(layout::PCI_PORTS),
            pins: bus.has_pins().then_some((layout::PCI_PIN_GSI, layout::PCI_PINS)),
            hotplug: bus.hotplug(),
        },
        virtio_mmio: bus.virtio_mmio(),
        vioapic: spec.vioapic.map(|_| (layout::VIOAPIC.0, layout::VIOAPIC.1 as u32)),
        serial: (spec.console == Console::Serial).then_some(serial),
        pvpanic_port: Some(layout::PVPANIC_PORT),
        pm: AcpiPorts::describe(layout::ACPI_PORT, layout::ACPI_EVENT_GSI),
        nodes,
        to_plug: to_plug.map(|room| (room.at, room.size)),
    };
    let open = |role, path| {
        let file = Source::open(role, path)?;
        Ok::<_, boot::BootError>(if spec.kernel_load == spec::KernelLoad::Map { file.mapped() } else { file })
    };
    let guest = boot::Guest {
        kernel: open("kernel", &spec.kernel)?,
        initrd: spec.initrd.as_deref().map(|path| open("initrd", path)).transpose()?,
        cmdline: &announce(&announce_memory(&spec.command_line(), spec), &platform.virtio_mmio),
        args: spec.cmdline.as_deref().unwrap_or_default(),
        decompress: match spec.kernel_decompress {
            spec::KernelDecompress::Guest => boot::Decompress::Guest,
            spec::KernelDecompress::Monitor => boot::Decompress::Monitor,
        },
        seed: random_seed(),
    };
    Ok(boot::load(ram, &guest, &platform)?.entry)
}

/// The guest's NUMA nodes, if it has several: each has as many CPUs, neighbours together.
fn nodes(memory: &spec::Memory, apic_ids: &[u32]) -> Vec<boot::Node> {
    let sizes = memory.node_sizes();
    if sizes.len() < 2 {
        return Vec::new();
    }
    let (count, cpus) = (sizes.len(), apic_ids.len());
    let parts = mem::nodes(&mem::ranges(memory.at_start()), &sizes).into_iter().enumerate();
    let own = |number: usize| apic_ids.get(number * cpus / count..(number + 1) * cpus / count);
    parts.map(|(number, memory)| boot::Node { apic_ids: own(number).unwrap_or_default().to_vec(), memory }).collect()
}

fn random_seed() -> Option<u64> {
    let mut seed = [0u8; 8];
    // SAFETY: the buffer is valid for the eight bytes asked for.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    (got == 8).then(|| u64::from_ne_bytes(seed))
}
