// SPDX-License-Identifier: Apache-2.0
//! The only room that names KVM ioctls: system, VM and vCPU descriptors, interrupt routing, statistics.
//!
//! `machine` drives it; nothing else of ours does. Calls are thin: one ioctl each, errors say which one failed.

mod dirty;
mod hardware;
pub mod probe;
mod ring;
mod stats;
mod vcpu;
mod vfio;
mod vm;

pub use dirty::{DirtyRing, bitmap_words};
pub use hardware::interrupt_hardware;
pub use kvm_bindings::{
    CpuId, KVM_X86_DISABLE_EXITS_CSTATE, KVM_X86_DISABLE_EXITS_HLT, KVM_X86_DISABLE_EXITS_MWAIT,
    KVM_X86_DISABLE_EXITS_PAUSE, Msrs, kvm_cpuid_entry2 as CpuidEntry, kvm_msr_entry as MsrEntry, kvm_regs as Regs,
    kvm_segment as Segment, kvm_sregs as Sregs,
};
pub use kvm_ioctls::VcpuExit as Exit;
pub use ring::CoalescedRing;
pub use stats::{StatKind, StatUnit, StatValue, Stats};
pub use vcpu::{Vcpu, flat_protected_mode};
pub use vfio::VfioFiles;
pub use vm::{IoAddress, Kvm, Route, Slot, Vm};

/// A KVM call that failed.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device node could not be opened.
    #[error("cannot open {path}: {source}; {hint}")]
    Open {
        /// The node.
        path: String,
        /// The host's reason.
        source: std::io::Error,
        /// What the user can do.
        hint: &'static str,
    },
    /// An ioctl failed.
    #[error("KVM refused {call}: {source}")]
    Call {
        /// The ioctl by its kernel name.
        call: &'static str,
        /// The host's reason.
        source: std::io::Error,
    },
    /// The host's KVM lacks something tare can't do without.
    #[error("this host's KVM lacks {0}; tare needs Linux 5.10 or newer")]
    Missing(&'static str),
}

impl From<KvmError> for std::io::Error {
    fn from(error: KvmError) -> Self {
        match error {
            KvmError::Open { source, .. } | KvmError::Call { source, .. } => source,
            KvmError::Missing(_) => Self::new(std::io::ErrorKind::Unsupported, error),
        }
    }
}

pub(crate) fn call(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |e| KvmError::Call { call, source: std::io::Error::from_raw_os_error(e.errno()) }
}
