// SPDX-License-Identifier: Apache-2.0
//! Tiny guests (`testkit::Code`) run by `machine`, with their serial output caught in a pipe.
//!
//! Used by the tests beside this folder and by the exit-cost benchmark.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use machine::{Accounting, ConsoleIo, Report};
pub use testkit::Code;

/// Where the code runs: 2 MiB.
const ENTRY: u64 = 0x20_0000;

/// Whether tiny guests can run here; says so if not.
pub fn have_kvm() -> bool {
    let usable = kvm::Kvm::open("/dev/kvm".as_ref()).and_then(|k| k.create_vm()).is_ok();
    if !usable {
        println!("skipped: no usable /dev/kvm; the lab's end-to-end tests cover this");
    }
    usable
}

/// A guest that is running.
pub struct Started<'a> {
    output: &'a mut PipeReader,
    seen: Vec<u8>,
    thread: &'a JoinHandle<Result<Report, machine::Error>>,
}

impl Started<'_> {
    /// Reads the guest's output until it ends with `end`.
    pub fn wait_for(&mut self, end: &[u8]) {
        let mut byte = [0u8];
        while !self.seen.ends_with(end) {
            self.output.read_exact(&mut byte).unwrap();
            self.seen.push(byte[0]);
        }
    }

    /// Sends a signal to the run's main thread, which alone reads it, again and again until the run is over: equal
    /// signals that are not read yet count as one.
    pub fn signal_to_the_end(&self, signal: libc::c_int) {
        // A signal that arrives after the run gave its signals back must not end the test process. A blocked signal is
        // queued though it is ignored, so the run itself still sees it.
        // SAFETY: SIG_IGN is a valid disposition.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
        while !self.thread.is_finished() {
            // SAFETY: the thread has not been joined: this value borrows its handle.
            unsafe { libc::pthread_kill(self.thread.as_pthread_t(), signal) };
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Runs `code`, lets `meanwhile` act while it runs, and gives the report and all serial output.
pub fn run(code: &Code, meanwhile: impl FnOnce(&mut Started<'_>)) -> (Report, Vec<u8>) {
    run_with(code, Accounting::On, meanwhile)
}

/// [`run`] with a choice of accounting.
pub fn run_with(code: &Code, accounting: Accounting, meanwhile: impl FnOnce(&mut Started<'_>)) -> (Report, Vec<u8>) {
    run_vm(code, accounting, |_| {}, meanwhile)
}

/// [`run_with`] on a machine that `change` made another.
pub fn run_vm(
    code: &Code,
    accounting: Accounting,
    change: impl FnOnce(&mut spec::Vm),
    meanwhile: impl FnOnce(&mut Started<'_>),
) -> (Report, Vec<u8>) {
    run_kernel(&code.elf(ENTRY), accounting, change, meanwhile)
}

/// [`run_vm`] of a kernel file.
pub fn run_kernel(
    file: &[u8],
    accounting: Accounting,
    change: impl FnOnce(&mut spec::Vm),
    meanwhile: impl FnOnce(&mut Started<'_>),
) -> (Report, Vec<u8>) {
    let mut kernel = tempfile::NamedTempFile::new().unwrap();
    kernel.write_all(file).unwrap();
    let mut vm = spec::Vm::new(kernel.path());
    vm.console = spec::Console::Serial;
    vm.memory.size = 64 << 20;
    vm.rng = false;
    change(&mut vm);
    let (mut reader, writer) = std::io::pipe().unwrap();
    let io = ConsoleIo { input: None, output: Arc::new(File::from(OwnedFd::from(writer))), terminal: false };
    let thread = std::thread::spawn(move || machine::run_with(&vm, &io, accounting));
    let mut started = Started { output: &mut reader, seen: Vec::new(), thread: &thread };
    meanwhile(&mut started);
    let mut output = std::mem::take(&mut started.seen);
    let report = thread.join().unwrap().unwrap_or_else(|e| panic!("the guest did not start: {e}"));
    reader.read_to_end(&mut output).unwrap();
    (report, output)
}
