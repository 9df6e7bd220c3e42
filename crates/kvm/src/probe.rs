// SPDX-License-Identifier: Apache-2.0
//! Is this KVM hardware? A counted loop in guest ring 0, timed, plus the capabilities by name. For `tare doctor` only.
//!
//! Reading CPU flags can't tell: a KVM without hardware behind it runs guest ring 3 natively and interprets ring 0.
//! The loop runs on its own thread, so that a KVM that never comes back costs its budget and no more.

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base::mmap::Mmap;
use kvm_bindings as kb;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

use crate::{KvmError, call, flat_protected_mode};

/// The guest: three pages from address 0, code in the second, the loop count in the third.
const RAM: usize = 0x3000;
const CODE_AT: usize = 0x1000;
const COUNT_AT: usize = 0x2000;
/// 32-bit code: `top: mov ecx,[0x2000]; l: dec ecx; jnz l; out 0x80,al; jmp top`.
const CODE: [u8; 13] = [0x8b, 0x0d, 0x00, 0x20, 0x00, 0x00, 0x49, 0x75, 0xfd, 0xe6, 0x80, 0xeb, 0xf3];
/// Instructions of one turn of the inner loop.
const PER_TURN: u64 = 2;
/// How long the last, longest round may take.
const LAST_ROUND: Duration = Duration::from_millis(20);

/// What the timed loop says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingZero {
    /// Nanoseconds for one instruction in guest ring 0: under 10 on hardware, about 1000 when interpreted.
    pub instruction_ns: f64,
    /// Nanoseconds for one exit to this process and back.
    pub exit_ns: f64,
}

impl RingZero {
    /// Above this many nanoseconds an instruction, guest kernels are interpreted.
    pub const INTERPRETED_NS: f64 = 100.0;

    /// Whether guest kernels run on the processor itself.
    #[must_use]
    pub fn is_hardware(&self) -> bool {
        self.instruction_ns < Self::INTERPRETED_NS
    }
}

/// Times the loop on the KVM at `path`, for at most `budget`. On a time-out the probing thread is left to itself: call
/// this from a process that is about to end.
///
/// # Errors
/// [`KvmError::Open`] or [`KvmError::Call`]; `ETIMEDOUT` from `KVM_RUN` when the budget is spent.
pub fn ring_zero(path: &Path, budget: Duration) -> Result<RingZero, KvmError> {
    let (tx, rx) = mpsc::channel();
    let path = path.to_owned();
    let run = move || drop(tx.send(timed_loop(&path)));
    let spawned = std::thread::Builder::new().name("kvm-probe".to_owned()).spawn(run);
    spawned.map_err(|source| KvmError::Call { call: "a probing thread", source })?;
    rx.recv_timeout(budget)
        .unwrap_or(Err(KvmError::Call { call: "KVM_RUN", source: io::Error::from_raw_os_error(libc::ETIMEDOUT) }))
}

fn open(path: &Path) -> Result<Kvm, KvmError> {
    let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default();
    Kvm::new_with_path(c_path).map_err(|e| KvmError::Open {
        path: path.display().to_string(),
        source: io::Error::from_raw_os_error(e.errno()),
        hint: "see `tare doctor`",
    })
}

fn timed_loop(path: &Path) -> Result<RingZero, KvmError> {
    let ram = Mmap::anonymous(RAM).map_err(|source| KvmError::Call { call: "mmap", source })?;
    let kvm = open(path)?;
    let vm = kvm.create_vm().map_err(call("KVM_CREATE_VM"))?;
    // Only processors that can't run unpaged guests by themselves need this; the others refuse or ignore it.
    let _ = vm.set_tss_address(0xfffb_d000);
    poke(&ram, CODE_AT, &CODE);
    let slot = kb::kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: RAM as u64,
        userspace_addr: ram.as_ptr() as u64,
    };
    // SAFETY: the mapping is RAM bytes long and outlives the VM: `ram` is declared before `vm` and so dropped after it.
    unsafe { vm.set_user_memory_region(slot) }.map_err(call("KVM_SET_USER_MEMORY_REGION"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(call("KVM_CREATE_VCPU"))?;
    enter_protected_mode(&vcpu)?;

    let mut round = |turns: u32, times: u32| -> Result<Duration, KvmError> {
        poke(&ram, COUNT_AT, &turns.to_le_bytes());
        let mut best = Duration::MAX;
        for _ in 0..times {
            best = best.min(one_exit(&mut vcpu)?);
        }
        Ok(best)
    };
    let exit = round(1, 16)?;
    let per_instruction = |took: Duration, turns: u32| {
        took.saturating_sub(exit).as_nanos() as f64 / (u64::from(turns - 1) * PER_TURN) as f64
    };
    let guess = per_instruction(round(500, 4)?, 500).max(0.1);
    let turns = (LAST_ROUND.as_nanos() as f64 / (guess * PER_TURN as f64)).clamp(500.0, 1e6) as u32;
    let instruction_ns = per_instruction(round(turns, 2)?, turns);
    Ok(RingZero { instruction_ns, exit_ns: exit.as_nanos() as f64 })
}

/// Writes into the guest's memory while its vCPU, which this same thread runs, stands still.
fn poke(ram: &Mmap, at: usize, bytes: &[u8]) {
    assert!(at + bytes.len() <= ram.len(), "a constant of this file points past the guest's memory");
    // SAFETY: the range is inside the mapping (checked above), no reference to the mapping exists, the vCPU stands still.
    unsafe { ram.as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn enter_protected_mode(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let mut sregs = vcpu.get_sregs().map_err(call("KVM_GET_SREGS"))?;
    flat_protected_mode(&mut sregs);
    vcpu.set_sregs(&sregs).map_err(call("KVM_SET_SREGS"))?;
    let regs = kb::kvm_regs { rip: CODE_AT as u64, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(call("KVM_SET_REGS"))
}

/// Runs to the next `out` and says how long that took.
fn one_exit(vcpu: &mut VcpuFd) -> Result<Duration, KvmError> {
    let start = Instant::now();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x80, _)) => return Ok(start.elapsed()),
            Ok(VcpuExit::Intr) => {}
            Ok(other) => {
                let source = io::Error::other(format!("the probing guest left with {other:?}"));
                return Err(KvmError::Call { call: "KVM_RUN", source });
            }
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
            Err(e) => return Err(call("KVM_RUN")(e)),
        }
    }
}

/// One capability and what `KVM_CHECK_EXTENSION` says: 0 is absent, a count or a version otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// A stable lower-case name.
    pub name: &'static str,
    /// KVM's answer.
    pub value: i32,
}

const CAPABILITIES: &[(&str, u32)] = &[
    ("irqchip", kb::KVM_CAP_IRQCHIP),
    ("split_irqchip", kb::KVM_CAP_SPLIT_IRQCHIP),
    ("irqfd", kb::KVM_CAP_IRQFD),
    ("irqfd_resample", kb::KVM_CAP_IRQFD_RESAMPLE),
    ("ioeventfd", kb::KVM_CAP_IOEVENTFD),
    ("ioeventfd_any_length", kb::KVM_CAP_IOEVENTFD_ANY_LENGTH),
    ("irq_routing", kb::KVM_CAP_IRQ_ROUTING),
    ("signal_msi", kb::KVM_CAP_SIGNAL_MSI),
    ("immediate_exit", kb::KVM_CAP_IMMEDIATE_EXIT),
    ("readonly_mem", kb::KVM_CAP_READONLY_MEM),
    ("memory_slots", kb::KVM_CAP_NR_MEMSLOTS),
    ("manual_dirty_log", kb::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2),
    ("dirty_ring", kb::KVM_CAP_DIRTY_LOG_RING),
    ("coalesced_mmio", kb::KVM_CAP_COALESCED_MMIO),
    ("coalesced_pio", kb::KVM_CAP_COALESCED_PIO),
    ("binary_stats", kb::KVM_CAP_BINARY_STATS_FD),
    ("x2apic_api", kb::KVM_CAP_X2APIC_API),
    ("tsc_deadline", kb::KVM_CAP_TSC_DEADLINE_TIMER),
    ("tsc_control", kb::KVM_CAP_TSC_CONTROL),
    ("halt_poll", kb::KVM_CAP_HALT_POLL),
    ("disable_exits", kb::KVM_CAP_X86_DISABLE_EXITS),
    ("user_space_msr", kb::KVM_CAP_X86_USER_SPACE_MSR),
    ("xsave2", kb::KVM_CAP_XSAVE2),
    ("guest_memfd", kb::KVM_CAP_GUEST_MEMFD),
    ("nested_state", kb::KVM_CAP_NESTED_STATE),
    ("recommended_vcpus", kb::KVM_CAP_NR_VCPUS),
    ("max_vcpus", kb::KVM_CAP_MAX_VCPUS),
];

/// What the KVM at `path` can do, always the same names in the same order.
///
/// # Errors
/// [`KvmError::Open`].
pub fn capabilities(path: &Path) -> Result<Vec<Capability>, KvmError> {
    let kvm = open(path)?;
    let ask =
        |&(name, cap): &(&'static str, u32)| Capability { name, value: kvm.check_extension_raw(cap.into()).max(0) };
    Ok(CAPABILITIES.iter().map(ask).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_is_an_error_not_a_guess() {
        let path = Path::new("/nonexistent/kvm");
        assert!(matches!(capabilities(path), Err(KvmError::Open { .. })));
        assert!(matches!(ring_zero(path, Duration::from_secs(5)), Err(KvmError::Open { .. })));
    }

    #[test]
    fn the_loop_counts_what_it_says() {
        let path = Path::new("/dev/kvm");
        if capabilities(path).is_err() {
            println!("skipped: no usable /dev/kvm");
            return;
        }
        let seen = ring_zero(path, Duration::from_secs(60)).unwrap();
        assert!(seen.instruction_ns > 0.0 && seen.exit_ns > 0.0, "{seen:?}");
        println!("{seen:?}, hardware: {}", seen.is_hardware());
    }

    #[test]
    fn a_spent_budget_is_an_error() {
        let path = Path::new("/dev/kvm");
        if capabilities(path).is_err() {
            println!("skipped: no usable /dev/kvm");
            return;
        }
        match ring_zero(path, Duration::ZERO) {
            Err(KvmError::Call { source, .. }) => assert_eq!(source.raw_os_error(), Some(libc::ETIMEDOUT)),
            other => panic!("{other:?}"),
        }
    }
}
