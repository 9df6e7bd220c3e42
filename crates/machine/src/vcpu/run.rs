// SPDX-License-Identifier: Apache-2.0
//! The vCPU loop: enter the guest, answer what it left for, count it. One thread a vCPU, named `vcpuN`.
//!
//! The loop takes no lock of its own; the device that answers an exit takes its own.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm::{Exit, StatValue, Vcpu};
use mem::prealloc::Prealloc;

use super::affinity::CpuSet;
use crate::control::Outcome;
use crate::dispatch::Dispatch;
use crate::ledger::{Counters, Party, Reason, guest_time_ns, ticks};
use crate::legacy::Ask;
use crate::places::Places;
use crate::timeline::{BOOT_PORT, GUEST_STARTS};

/// The signal that gets a vCPU thread out of the guest.
fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Stack of a vCPU thread: the loop and the devices it calls need little.
const STACK: usize = 128 << 10;

/// Whether exits to the monitor are counted and timed. Always on in `tare run`; off is the benchmark's other side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accounting {
    /// Count and time each exit.
    #[default]
    On,
    /// Don't.
    Off,
    /// Count and time each, and note where it came from: another system call's worth an exit.
    Places,
}

/// A running vCPU thread.
pub struct Started {
    /// Gives the vCPU back, so that its run page outlives every use of `immediate_exit`.
    thread: JoinHandle<(Vcpu, Stopped)>,
    immediate_exit: ImmediateExit,
}

/// The immediate-exit byte of a vCPU's run page.
struct ImmediateExit(*const AtomicU8);

// SAFETY: the byte is an atomic in a page that stays mapped until the vCPU is dropped, which `Started::stop` does last.
unsafe impl Send for ImmediateExit {}

/// What a vCPU thread leaves behind.
pub struct Stopped {
    /// What it counted.
    pub counters: Counters,
    /// KVM's counters.
    pub stats: Vec<StatValue>,
    /// The kernel's guest time of the thread, nanoseconds.
    pub guest_ns: u64,
    /// Where its exits came from, if that was asked for.
    pub places: Option<Places>,
}

/// What a vCPU's thread does before it enters the guest.
pub struct Before {
    /// Moves to these host CPUs, if there are any.
    pub pin: Option<CpuSet>,
    /// Takes its part in making memory ready.
    pub memory: Option<Arc<Prealloc>>,
}

/// Starts vCPU `id` on a thread of its own.
///
/// # Errors
/// When the host gives no more threads.
pub fn spawn(
    id: u8,
    mut vcpu: Vcpu,
    before: Before,
    dispatch: Arc<Dispatch>,
    accounting: Accounting,
) -> io::Result<Started> {
    install_kick_handler()?;
    let immediate_exit = ImmediateExit(vcpu.immediate_exit());
    let thread = std::thread::Builder::new().name(format!("vcpu{id}")).stack_size(STACK).spawn(move || {
        // `build` has seen that it may; only a cpuset that changed since can say no.
        if let Some(Err(e)) = before.pin.map(|cpus| cpus.pin_self()) {
            dispatch.control().finish(Outcome::GuestFault(format!("vCPU {id} can't be pinned: {e}")));
        }
        if let Some(memory) = before.memory {
            memory.work();
            if let Err(e) = memory.result() {
                let what = format!(
                    "{} of {} MiB of guest memory could be had: {e}",
                    memory.done() >> 20,
                    memory.total() >> 20
                );
                dispatch.control().finish(Outcome::GuestFault(format!("{what}; ask for less with --memory")));
            }
        }
        let mut counters = Counters::default();
        let mut places = None;
        if accounting == Accounting::Places {
            vcpu.sync_registers();
            places = Some(Places::default());
        }
        if id == 0 {
            dispatch.timeline().note(GUEST_STARTS);
        }
        while !dispatch.control().stopping() {
            match accounting {
                Accounting::On => drop(step::<true>(id, &mut vcpu, &dispatch, &mut counters)),
                Accounting::Off => drop(step::<false>(id, &mut vcpu, &dispatch, &mut counters)),
                Accounting::Places => {
                    let (reason, at) = step::<true>(id, &mut vcpu, &dispatch, &mut counters);
                    if let Some(places) = &mut places {
                        places.add(reason, at, vcpu.synced_rip());
                    }
                }
            }
        }
        let stats = vcpu.stats().map(|s| s.read()).unwrap_or_default();
        (vcpu, Stopped { counters, stats, guest_ns: own_guest_ns(), places })
    })?;
    Ok(Started { thread, immediate_exit })
}

impl Started {
    /// Waits for the thread, which must have been told to stop through `Control`; kicks it out of the guest.
    pub fn stop(self) -> Option<Stopped> {
        while !self.thread.is_finished() {
            // SAFETY: the thread has not been joined, so it still owns the vCPU or hands it over in its result: the run
            // page is mapped.
            unsafe { (*self.immediate_exit.0).store(1, Ordering::Release) };
            // SAFETY: the thread has not been joined, so its handle is valid.
            unsafe { libc::pthread_kill(self.thread.as_pthread_t(), kick_signal()) };
            std::thread::sleep(Duration::from_millis(1));
        }
        let (_vcpu, stopped) = self.thread.join().ok()?;
        Some(stopped)
    }
}

/// One entry into the guest and the answer to what it left for: why, and the port or address it touched.
#[inline]
fn step<const COUNT: bool>(id: u8, vcpu: &mut Vcpu, dispatch: &Dispatch, counters: &mut Counters) -> (Reason, u64) {
    let before = if COUNT { ticks() } else { 0 };
    let exit = vcpu.run();
    let left = if COUNT { ticks() } else { 0 };
    let nowhere = (Reason::Other, Party::Kvm, Ask::Nothing);
    let (at, (reason, party, ask)) = match exit {
        Ok(Exit::IoIn(port, data)) => (port.into(), dispatch.port_read(port, data)),
        Ok(Exit::IoOut(port, data)) => (port.into(), dispatch.port_write(port, data)),
        Ok(Exit::MmioRead(at, data)) => (at, dispatch.mmio_read(at, data)),
        Ok(Exit::MmioWrite(at, data)) => (at, dispatch.mmio_write(at, data)),
        Ok(Exit::IoapicEoi(vector)) => (vector.into(), dispatch.interrupt_ended(vector)),
        Ok(Exit::Intr) => (0, (Reason::Signal, Party::Kvm, Ask::Nothing)),
        Ok(other) => {
            let what = fatal(&other);
            let detail = if matches!(what, Fatal::Internal) { vcpu.internal_error() } else { 0 };
            finish_fatal(id, vcpu, &what, detail, dispatch);
            (0, nowhere)
        }
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
            (0, (Reason::Signal, Party::Kvm, Ask::Nothing))
        }
        Err(e) => {
            dispatch.control().finish(Outcome::GuestFault(format!("vCPU {id} can't run: {e}")));
            (0, nowhere)
        }
    };
    if COUNT {
        counters.run_ticks += left.wrapping_sub(before);
        counters.add(reason, party, ticks().wrapping_sub(left));
    }
    match ask {
        Ask::Nothing => {}
        Ask::PowerOff => dispatch.control().finish(Outcome::PowerOff),
        Ask::Reset => dispatch.control().finish(Outcome::Reset),
        Ask::Panic => dispatch.control().finish(Outcome::Panic),
        Ask::Exit(status) => dispatch.control().finish(Outcome::Exit(status)),
        Ask::Mark(BOOT_PORT, value) => dispatch.timeline().boot_port(value),
        Ask::Mark(_, value) => dispatch.timeline().debug_port(value),
    }
    (reason, at)
}

/// Exits after which the guest can't go on.
enum Fatal {
    TripleFault,
    Internal,
    Entry(u64),
    Halted,
    Other(String),
}

fn fatal(exit: &Exit<'_>) -> Fatal {
    match exit {
        Exit::Shutdown => Fatal::TripleFault,
        Exit::InternalError => Fatal::Internal,
        Exit::FailEntry(reason, _) => Fatal::Entry(*reason),
        Exit::Hlt => Fatal::Halted,
        Exit::SystemEvent(kind, _) => Fatal::Other(format!("system event {kind}")),
        other => Fatal::Other(format!("{other:?}")),
    }
}

fn finish_fatal(id: u8, vcpu: &Vcpu, what: &Fatal, detail: u32, dispatch: &Dispatch) {
    let rip = vcpu.regs().map(|r| r.rip).unwrap_or_default();
    let outcome = match what {
        // Linux resets itself with a triple fault when told `reboot=t`, and when all else failed: a reset is what it wants.
        Fatal::TripleFault => Outcome::Reset,
        Fatal::Internal => Outcome::GuestFault(format!(
            "KVM can't emulate an instruction of vCPU {id} at {rip:#x} (internal error {detail})"
        )),
        Fatal::Entry(reason) => {
            Outcome::GuestFault(format!("the CPU refuses to enter vCPU {id} at {rip:#x} ({reason:#x})"))
        }
        Fatal::Halted => Outcome::GuestFault(format!("vCPU {id} halted for good at {rip:#x}")),
        Fatal::Other(what) => Outcome::GuestFault(format!("vCPU {id} stopped at {rip:#x}: {what}")),
    };
    dispatch.control().finish(outcome);
}

/// The kick does nothing itself: its arrival makes `KVM_RUN` return.
fn install_kick_handler() -> io::Result<()> {
    extern "C" fn on_kick(_: libc::c_int) {}
    // SAFETY: a zeroed sigaction is valid; the handler is async-signal-safe since it does nothing.
    let rc = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_kick as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(kick_signal(), &action, std::ptr::null_mut())
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn own_guest_ns() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    guest_time_ns(&stat, u64::try_from(hz).unwrap_or(100))
}
