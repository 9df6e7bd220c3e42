// SPDX-License-Identifier: Apache-2.0
//! The system and VM descriptors: memory slots, the in-kernel interrupt chips, eventfds and message routing.

use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use base::{EventFd, Gpa, Gsi, Hva};
use kvm_bindings::{
    KVM_API_VERSION, KVM_CAP_COALESCED_PIO, KVM_CAP_HALT_POLL, KVM_CAP_NR_MEMSLOTS, KVM_CAP_SPLIT_IRQCHIP,
    KVM_CAP_X86_DISABLE_EXITS, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC,
    KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY,
    KvmIrqRouting, kvm_enable_cap, kvm_irq_routing_entry, kvm_msi, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VmFd};

use crate::{CpuidEntry, KvmError, Stats, Vcpu, call};

/// `/dev/kvm`.
pub struct Kvm {
    fd: kvm_ioctls::Kvm,
}

impl Kvm {
    /// Opens the KVM device node at `path` and checks the API version and the capabilities tare can't do without.
    ///
    /// # Errors
    /// [`KvmError::Open`] when the node is missing or forbidden, [`KvmError::Missing`] when KVM is too old.
    pub fn open(path: &Path) -> Result<Self, KvmError> {
        let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default();
        let fd = kvm_ioctls::Kvm::new_with_path(c_path).map_err(|e| {
            let source = std::io::Error::from_raw_os_error(e.errno());
            let hint = match source.kind() {
                std::io::ErrorKind::NotFound => {
                    "load kvm_intel or kvm_amd, or enable nested virtualization for this machine (see `tare doctor`)"
                }
                std::io::ErrorKind::PermissionDenied => "add yourself to the group kvm, or run as root",
                _ => "see `tare doctor`",
            };
            KvmError::Open { path: path.display().to_string(), source, hint }
        })?;
        if fd.get_api_version() != KVM_API_VERSION as i32 {
            return Err(KvmError::Missing("API version 12"));
        }
        for (cap, name) in [
            (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
            (Cap::Irqfd, "KVM_CAP_IRQFD"),
            (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
            (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
            (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        ] {
            if !fd.check_extension(cap) {
                return Err(KvmError::Missing(name));
            }
        }
        Ok(Self { fd })
    }

    /// The most vCPUs a VM may have on this host.
    #[must_use]
    pub fn max_vcpus(&self) -> usize {
        self.fd.get_max_vcpus()
    }

    /// How many numbers there are for vCPUs, which are their APIC ids and may have gaps.
    #[must_use]
    pub fn max_vcpu_ids(&self) -> usize {
        self.fd.get_max_vcpu_id()
    }

    /// What KVM can show a guest, one entry per leaf and sub-leaf.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn supported_cpuid(&self) -> Result<Vec<CpuidEntry>, KvmError> {
        let cpuid = self.fd.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(call("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(cpuid.as_slice().to_vec())
    }

    /// Whether the in-kernel LAPIC offers the TSC-deadline timer, which `supported_cpuid` does not tell.
    #[must_use]
    pub fn has_tsc_deadline(&self) -> bool {
        self.fd.check_extension(Cap::TscDeadlineTimer)
    }

    /// Makes an empty VM.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn create_vm(&self) -> Result<Vm, KvmError> {
        let fd = self.fd.create_vm().map_err(call("KVM_CREATE_VM"))?;
        Ok(Vm { fd: Arc::new(fd) })
    }
}

/// Where an ioeventfd listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoAddress {
    /// A guest physical address.
    Mmio(Gpa),
    /// An I/O port.
    Pio(u16),
}

impl IoAddress {
    fn raw(self) -> IoEventAddress {
        match self {
            Self::Mmio(at) => IoEventAddress::Mmio(at.0),
            Self::Pio(port) => IoEventAddress::Pio(u64::from(port)),
        }
    }
}

/// A memory slot: a run of guest memory and where it is in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The slot's number.
    pub number: u32,
    /// First guest address, a multiple of a page.
    pub at: Gpa,
    /// Bytes, whole pages.
    pub size: u64,
    /// Where the first byte is here.
    pub host: Hva,
    /// The guest's writes leave to the monitor.
    pub readonly: bool,
    /// The pages that the guest writes are noted.
    pub log: bool,
}

/// One entry of the interrupt routing table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `gsi` is this pin of the in-kernel IOAPIC (and of the PIC below 16).
    Pin {
        /// The interrupt.
        gsi: Gsi,
    },
    /// `gsi` sends a message.
    Msi {
        /// The interrupt.
        gsi: Gsi,
        /// Message address.
        address: u64,
        /// Message data.
        data: u32,
    },
}

/// One VM. Cloning shares it.
#[derive(Clone)]
pub struct Vm {
    fd: Arc<VmFd>,
}

impl Vm {
    pub(crate) fn vm_fd(&self) -> &VmFd {
        &self.fd
    }

    /// PIC, IOAPIC and LAPICs in the kernel; no PIT, whose tick reinjection would keep AVIC off.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn create_irqchip(&self) -> Result<(), KvmError> {
        self.reserve_pages()?;
        self.fd.create_irq_chip().map_err(call("KVM_CREATE_IRQCHIP"))
    }

    /// LAPICs in the kernel, and nothing else: PIC and I/O APIC are the monitor's. The end of a level-triggered interrupt that
    /// is routed from one of the first `pins` numbers leaves to the monitor. `false` where KVM can't do that.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn split_irqchip(&self, pins: u8) -> Result<bool, KvmError> {
        if !self.fd.check_extension(Cap::SplitIrqchip) {
            return Ok(false);
        }
        self.reserve_pages()?;
        let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
        cap.args[0] = u64::from(pins);
        self.fd.enable_cap(&cap).map_err(call("KVM_ENABLE_CAP of KVM_CAP_SPLIT_IRQCHIP"))?;
        Ok(true)
    }

    /// Has a vCPU that halts poll for up to `ns` nanoseconds before its thread sleeps; 0 sleeps at once. `false` where KVM
    /// has no setting for a single VM.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_halt_poll(&self, ns: u32) -> Result<bool, KvmError> {
        if self.fd.check_extension_raw(u64::from(KVM_CAP_HALT_POLL)) <= 0 {
            return Ok(false);
        }
        let mut cap = kvm_enable_cap { cap: KVM_CAP_HALT_POLL, ..Default::default() };
        cap.args[0] = u64::from(ns);
        self.fd.enable_cap(&cap).map_err(call("KVM_ENABLE_CAP of KVM_CAP_HALT_POLL"))?;
        Ok(true)
    }

    /// The exits that this host can leave out, `KVM_X86_DISABLE_EXITS_*`; 0 for none.
    #[must_use]
    pub fn exits_to_disable(&self) -> u32 {
        u32::try_from(self.fd.check_extension_raw(u64::from(KVM_CAP_X86_DISABLE_EXITS))).unwrap_or(0)
    }

    /// Leaves out exits; `bits` of [`Vm::exits_to_disable`]. To be called before there are vCPUs.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn disable_exits(&self, bits: u32) -> Result<(), KvmError> {
        let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_DISABLE_EXITS, ..Default::default() };
        cap.args[0] = u64::from(bits);
        self.fd.enable_cap(&cap).map_err(call("KVM_ENABLE_CAP of KVM_CAP_X86_DISABLE_EXITS"))
    }

    /// Three pages below the I/O APIC that no slot covers; Intel hosts need them for real-mode emulation.
    fn reserve_pages(&self) -> Result<(), KvmError> {
        self.fd.set_identity_map_address(0xfeff_c000).map_err(call("KVM_SET_IDENTITY_MAP_ADDR"))?;
        self.fd.set_tss_address(0xfeff_d000).map_err(call("KVM_SET_TSS_ADDR"))
    }

    /// What KVM says of a capability; 0 is absent.
    pub(crate) fn capability(&self, cap: u32) -> i32 {
        self.fd.check_extension_raw(u64::from(cap)).max(0)
    }

    /// Switches a capability on; `false` when KVM refuses.
    pub(crate) fn enable_cap(&self, request: &kvm_enable_cap) -> bool {
        self.fd.enable_cap(request).is_ok()
    }

    /// How many memory slots this host's KVM has.
    #[must_use]
    pub fn most_slots(&self) -> u32 {
        // Kernels before the capability had 32.
        u32::try_from(self.fd.check_extension_raw(u64::from(KVM_CAP_NR_MEMSLOTS))).ok().filter(|n| *n > 0).unwrap_or(32)
    }

    /// Registers a memory slot, or switches the log of one that is registered.
    ///
    /// # Safety
    /// The slot's bytes must stay mapped at their host address while it is registered, and hold nothing the guest may not
    /// see.
    ///
    /// # Errors
    /// [`KvmError::Call`] when the slot overlaps another or there are none left.
    pub unsafe fn set_slot(&self, slot: &Slot) -> Result<(), KvmError> {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let region = kvm_userspace_memory_region {
            slot: slot.number,
            flags: flag(slot.readonly, KVM_MEM_READONLY) | flag(slot.log, KVM_MEM_LOG_DIRTY_PAGES),
            guest_phys_addr: slot.at.0,
            memory_size: slot.size,
            userspace_addr: slot.host.0,
        };
        // SAFETY: the caller keeps the host range mapped while the slot exists.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(call("KVM_SET_USER_MEMORY_REGION"))
    }

    /// Takes memory slot `number` away, which is at `at`.
    ///
    /// # Errors
    /// [`KvmError::Call`] when there is none.
    pub fn remove_slot(&self, number: u32, at: Gpa) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region { slot: number, guest_phys_addr: at.0, ..Default::default() };
        // SAFETY: a slot of no bytes needs no memory.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(call("KVM_SET_USER_MEMORY_REGION"))
    }

    /// Guest writes to `at` signal `fd` instead of leaving to the monitor: of any width and value, or only 32-bit ones of
    /// `value`.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn add_ioeventfd(&self, fd: &EventFd, at: IoAddress, value: Option<u32>) -> Result<(), KvmError> {
        match value {
            None => self.fd.register_ioevent(fd, &at.raw(), NoDatamatch),
            Some(value) => self.fd.register_ioevent(fd, &at.raw(), value),
        }
        .map_err(call("KVM_IOEVENTFD"))
    }

    /// Undoes [`Vm::add_ioeventfd`].
    ///
    /// # Errors
    /// [`KvmError::Call`] when it was not there.
    pub fn remove_ioeventfd(&self, fd: &EventFd, at: IoAddress, value: Option<u32>) -> Result<(), KvmError> {
        match value {
            None => self.fd.unregister_ioevent(fd, &at.raw(), NoDatamatch),
            Some(value) => self.fd.unregister_ioevent(fd, &at.raw(), value),
        }
        .map_err(call("KVM_IOEVENTFD"))
    }

    /// Writing `fd` raises `gsi`.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn add_irqfd(&self, fd: &EventFd, gsi: Gsi) -> Result<(), KvmError> {
        self.fd.register_irqfd(fd, gsi.0).map_err(call("KVM_IRQFD"))
    }

    /// Writing `fd` asserts `gsi`, a pin of KVM's own I/O APIC; when the guest ended the interrupt it is released, and `ended`
    /// is written.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn add_resampled_irqfd(&self, fd: &EventFd, ended: &EventFd, gsi: Gsi) -> Result<(), KvmError> {
        self.fd.register_irqfd_with_resample(fd, ended, gsi.0).map_err(call("KVM_IRQFD with a resample descriptor"))
    }

    /// Undoes [`Vm::add_irqfd`]; what was written before has been raised.
    ///
    /// # Errors
    /// [`KvmError::Call`] when it was not there.
    pub fn remove_irqfd(&self, fd: &EventFd, gsi: Gsi) -> Result<(), KvmError> {
        self.fd.unregister_irqfd(fd, gsi.0).map_err(call("KVM_IRQFD"))
    }

    /// Sends a message interrupt now; whether some local APIC took it.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn signal_msi(&self, address: u64, data: u32) -> Result<bool, KvmError> {
        let (address_lo, address_hi) = (address as u32, (address >> 32) as u32);
        let msi = kvm_msi { address_lo, address_hi, data, ..Default::default() };
        self.fd.signal_msi(msi).map(|taken| taken > 0).map_err(call("KVM_SIGNAL_MSI"))
    }

    /// Replaces the whole interrupt routing table.
    ///
    /// # Errors
    /// [`KvmError::Call`] when the table is too long.
    pub fn set_routes(&self, routes: &[Route]) -> Result<(), KvmError> {
        let mut entries = Vec::with_capacity(routes.len() * 2);
        for route in routes {
            match *route {
                Route::Pin { gsi } => {
                    entries.push(pin(gsi.0, KVM_IRQCHIP_IOAPIC, gsi.0));
                    if gsi.0 < 8 {
                        entries.push(pin(gsi.0, KVM_IRQCHIP_PIC_MASTER, gsi.0));
                    } else if gsi.0 < 16 {
                        entries.push(pin(gsi.0, KVM_IRQCHIP_PIC_SLAVE, gsi.0 - 8));
                    }
                }
                Route::Msi { gsi, address, data } => {
                    let mut entry =
                        kvm_irq_routing_entry { gsi: gsi.0, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
                    entry.u.msi.address_lo = address as u32;
                    entry.u.msi.address_hi = (address >> 32) as u32;
                    entry.u.msi.data = data;
                    entries.push(entry);
                }
            }
        }
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| KvmError::Missing("room for that many interrupt routes"))?;
        self.fd.set_gsi_routing(&table).map_err(call("KVM_SET_GSI_ROUTING"))
    }

    /// Makes the vCPU whose LAPIC has number `id`.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn create_vcpu(&self, id: u32) -> Result<Vcpu, KvmError> {
        let fd = self.fd.create_vcpu(u64::from(id)).map_err(call("KVM_CREATE_VCPU"))?;
        Ok(Vcpu::new(fd))
    }

    /// Lets KVM queue byte writes to `port` in the ring of [`crate::CoalescedRing`] instead of leaving to the monitor for
    /// each. `false` where the host can't.
    pub fn coalesce_port(&self, port: u16) -> bool {
        self.fd.check_extension_raw(u64::from(KVM_CAP_COALESCED_PIO)) > 0
            && self.fd.register_coalesced_mmio(IoEventAddress::Pio(u64::from(port)), 1).is_ok()
    }

    /// Undoes [`Vm::coalesce_port`]: writes to `port` leave to the monitor again.
    pub fn uncoalesce_port(&self, port: u16) {
        // It was registered with the same arguments, so this can't fail.
        let _ = self.fd.unregister_coalesced_mmio(IoEventAddress::Pio(u64::from(port)), 1);
    }

    /// KVM's own counters for this VM, or `None` before Linux 5.14.
    #[must_use]
    pub fn stats(&self) -> Option<Stats> {
        Stats::open(&*self.fd)
    }
}

impl AsRawFd for Vm {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn pin(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}
