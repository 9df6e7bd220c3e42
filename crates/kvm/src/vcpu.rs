// SPDX-License-Identifier: Apache-2.0
//! One virtual CPU: registers, CPUID, MSRs, and the call that runs it. Owned by its thread.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{CpuId, Msrs, kvm_mp_state, kvm_xcrs};
use kvm_ioctls::{SyncReg, VcpuFd};

use crate::{CoalescedRing, CpuidEntry, Exit, KvmError, MsrEntry, Regs, Segment, Sregs, Stats, call};

/// `KVM_X86_SETUP_MCE`, which kvm-ioctls does not have: `_IOW(0xae, 0x9c, u64)`.
const KVM_X86_SETUP_MCE: libc::c_ulong = 0x4008_ae9c;

/// Protected mode with flat 32-bit segments and no paging, for guests of a few instructions: runs the same on every processor
/// with hardware virtualization.
pub fn flat_protected_mode(sregs: &mut Sregs) {
    let data = Segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x10,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Segment::default()
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cs = Segment { selector: 0x8, type_: 11, ..data };
    sregs.cr0 |= 1;
}

/// One virtual CPU.
pub struct Vcpu {
    fd: VcpuFd,
}

impl Vcpu {
    pub(crate) fn new(fd: VcpuFd) -> Self {
        Self { fd }
    }

    /// Enters the guest until something is for the monitor.
    ///
    /// # Errors
    /// `EINTR` after a signal or [`Vcpu::immediate_exit`], `EAGAIN` for a vCPU not started yet, else what KVM says.
    #[inline]
    pub fn run(&mut self) -> io::Result<Exit<'_>> {
        self.fd.run().map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }

    /// The byte that makes the next `run` return at once with `EINTR` when not 0. Other threads may set it.
    pub fn immediate_exit(&mut self) -> *const AtomicU8 {
        std::ptr::from_mut(&mut self.fd.get_kvm_run().immediate_exit).cast::<AtomicU8>().cast_const()
    }

    /// Clears the immediate-exit byte.
    pub fn clear_immediate_exit(&mut self) {
        let byte = self.immediate_exit();
        // SAFETY: the byte lies in the run page, which lives as long as self.fd; AtomicU8 has the layout of u8.
        unsafe { (*byte).store(0, Ordering::Relaxed) };
    }

    /// Has each return from `run` leave the general registers in the run page, for [`Vcpu::synced_rip`].
    pub fn sync_registers(&mut self) {
        self.fd.set_sync_valid_reg(SyncReg::Register);
    }

    /// The guest's instruction pointer when `run` last returned; 0 without [`Vcpu::sync_registers`].
    #[must_use]
    pub fn synced_rip(&mut self) -> u64 {
        self.fd.sync_regs().regs.rip
    }

    /// Sets what the guest's CPUID instruction answers.
    ///
    /// # Errors
    /// [`KvmError::Call`] when KVM finds the table inconsistent.
    pub fn set_cpuid(&self, entries: &[CpuidEntry]) -> Result<(), KvmError> {
        let table = CpuId::from_entries(entries).map_err(|_| KvmError::Missing("room for that many CPUID leaves"))?;
        self.fd.set_cpuid2(&table).map_err(call("KVM_SET_CPUID2"))
    }

    /// Sets model-specific registers; those the host does not know are left out without a word.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_msrs(&self, entries: &[MsrEntry]) -> Result<(), KvmError> {
        for entry in entries {
            let table = Msrs::from_entries(&[*entry]).map_err(|_| KvmError::Missing("room for an MSR"))?;
            self.fd.set_msrs(&table).map_err(call("KVM_SET_MSRS"))?;
        }
        Ok(())
    }

    /// Gives the guest `banks` machine-check banks (1 to 32) instead of KVM's 32, each of which a guest reads and clears
    /// at boot, an exit each time.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_machine_check_banks(&self, banks: u8) -> Result<(), KvmError> {
        let cap = u64::from(banks);
        // SAFETY: the ioctl reads eight bytes at &cap, which lives for the call.
        let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), KVM_X86_SETUP_MCE, &raw const cap) };
        if rc < 0 {
            return Err(KvmError::Call { call: "KVM_X86_SETUP_MCE", source: io::Error::last_os_error() });
        }
        Ok(())
    }

    /// Starts the guest with every extended state switched on in XCR0 that `xcr0` names (CPUID 0xd.0, edx:eax).
    ///
    /// A kernel sets XCR0 itself, and KVM, which intercepts that, then corrects the area size in CPUID 0xd. A KVM on an
    /// emulated SVM never sees the write: the guest finds a size that contradicts its XCR0 and runs without AVX. Starting
    /// with what the guest is about to set is right on both.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_xcr0(&self, xcr0: u64) -> Result<(), KvmError> {
        let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        xcrs.xcrs[0].value = xcr0;
        self.fd.set_xcrs(&xcrs).map_err(call("KVM_SET_XCRS"))
    }

    /// Whether the vCPU runs now (`true`) or waits for its start-up IPI.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_runnable(&self, runnable: bool) -> Result<(), KvmError> {
        let mp_state =
            if runnable { kvm_bindings::KVM_MP_STATE_RUNNABLE } else { kvm_bindings::KVM_MP_STATE_UNINITIALIZED };
        self.fd.set_mp_state(kvm_mp_state { mp_state }).map_err(call("KVM_SET_MP_STATE"))
    }

    /// General registers.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn regs(&self) -> Result<Regs, KvmError> {
        self.fd.get_regs().map_err(call("KVM_GET_REGS"))
    }

    /// Sets the general registers.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_regs(&self, regs: &Regs) -> Result<(), KvmError> {
        self.fd.set_regs(regs).map_err(call("KVM_SET_REGS"))
    }

    /// Segment and control registers.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn sregs(&self) -> Result<Sregs, KvmError> {
        self.fd.get_sregs().map_err(call("KVM_GET_SREGS"))
    }

    /// Sets the segment and control registers.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn set_sregs(&self, sregs: &Sregs) -> Result<(), KvmError> {
        self.fd.set_sregs(sregs).map_err(call("KVM_SET_SREGS"))
    }

    /// The guest's TSC frequency in kHz, where KVM tells.
    #[must_use]
    pub fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|&khz| khz > 0)
    }

    /// Which of KVM's internal errors ended the last run (`KVM_INTERNAL_ERROR_*`), valid after [`Exit::InternalError`].
    pub fn internal_error(&mut self) -> u32 {
        // SAFETY: `internal` is plain old data at the same place in every variant's run page; any bits are a valid u32.
        unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror }
    }

    /// The ring of the pages that it writes, whose VM was told of `bytes` by [`crate::Vm::dirty_ring`].
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn dirty_ring(&self, bytes: u32) -> std::io::Result<crate::DirtyRing> {
        crate::DirtyRing::map(&self.fd, bytes)
    }

    /// The VM's ring of coalesced writes, mapped through this vCPU.
    #[must_use]
    pub fn coalesced_ring(&self) -> Option<CoalescedRing> {
        CoalescedRing::map(&self.fd)
    }

    /// KVM's own counters for this vCPU, or `None` before Linux 5.14.
    #[must_use]
    pub fn stats(&self) -> Option<Stats> {
        Stats::open(&self.fd)
    }
}

impl AsRawFd for Vcpu {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
