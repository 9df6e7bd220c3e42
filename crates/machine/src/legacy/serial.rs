// SPDX-License-Identifier: Apache-2.0
//! The 16550 at port 0x3f8, from vm-superio, with output gathered into lines and transmit writes coalesced by KVM.
//!
//! vCPU threads call it under the machine's serial lock; the main thread feeds input and flushes half lines.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use irq::IrqLine;
use kvm::{CoalescedRing, Vm};

use crate::timer::Timer;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

/// How long half a line waits for its end.
const HALF_LINE: Duration = Duration::from_millis(50);
/// Line status register: reading it before each byte is how a guest polls.
const LSR: u16 = 5;
/// Interrupt enable register, and its bit for "transmitter empty".
const IER: u16 = 1;
const IER_THRI: u8 = 2;
/// How often coalescing is switched back on. Each switch costs about as much as a few exits, and a driver that sends by
/// interrupt (as Linux's does once user space has opened the port) would switch for each piece of output.
const SWITCHES: u32 = 16;
/// Bytes gathered at most before they are written out.
const GATHER: usize = 512;

/// Raises the port's interrupt line.
pub struct Line(Arc<dyn IrqLine>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.pulse();
        Ok(())
    }
}

/// Gathers single bytes into lines: one write a line instead of one a byte.
struct Gather {
    out: Arc<File>,
    buffer: Vec<u8>,
}

impl Gather {
    /// Writes out what is gathered. Output that nobody reads any more (a closed pipe) is dropped; a full pipe is waited for.
    fn send(&mut self) {
        if !self.buffer.is_empty() {
            let _ = (&*self.out).write_all(&self.buffer);
            self.buffer.clear();
        }
    }
}

impl Write for Gather {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if bytes.contains(&b'\n') || self.buffer.len() >= GATHER {
            self.send();
        }
        Ok(bytes.len())
    }

    /// vm-superio flushes after each byte; lines are flushed by [`SerialPort::flush`] instead.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Transmit bytes that KVM queues instead of leaving to the monitor, as long as the guest polls: a guest that waits for
/// the interrupt after a byte would wait for ever, since nobody has seen the byte.
pub struct Coalesced {
    vm: Vm,
    ring: CoalescedRing,
    port: u16,
    on: bool,
    switches: u32,
}

impl Coalesced {
    /// For writes to `port` of `vm` through `ring`, from the guest's first poll on.
    #[must_use]
    pub fn new(vm: &Vm, ring: CoalescedRing, port: u16) -> Self {
        Self { vm: vm.clone(), ring, port, on: false, switches: 0 }
    }

    fn set(&mut self, on: bool) {
        if on == self.on {
            return;
        }
        if !on {
            self.vm.uncoalesce_port(self.port);
            self.on = false;
        } else if self.switches < SWITCHES {
            self.switches += 1;
            self.on = self.vm.coalesce_port(self.port);
        }
    }
}

/// The port and what feeds it.
pub struct SerialPort {
    uart: Serial<Line, NoEvents, Gather>,
    coalesced: Option<Coalesced>,
    /// Input that found the receive FIFO full.
    waiting: Vec<u8>,
    /// Wakes the main loop to flush half a line.
    timer: Arc<Timer>,
    armed: bool,
    /// Whether the guest sends by interrupt rather than by polling.
    by_interrupt: bool,
}

impl SerialPort {
    /// A port that writes to `out` and raises `line`. When `timer` fires, call [`SerialPort::flush`].
    #[must_use]
    pub fn new(line: Arc<dyn IrqLine>, out: Arc<File>, timer: Arc<Timer>) -> Self {
        let gather = Gather { out, buffer: Vec::with_capacity(GATHER) };
        Self {
            uart: Serial::new(Line(line), gather),
            coalesced: None,
            waiting: Vec::new(),
            timer,
            armed: false,
            by_interrupt: false,
        }
    }

    /// Takes transmit bytes from `coalesced` from now on.
    pub fn coalesce(&mut self, coalesced: Coalesced) {
        self.coalesced = Some(coalesced);
    }

    /// Bytes that KVM queued go out before anything else happens.
    fn drain(&mut self) {
        let Some(coalesced) = &mut self.coalesced else { return };
        while let Some((port, byte)) = coalesced.ring.pop() {
            if port == u64::from(coalesced.port) {
                // A failed interrupt trigger can't be answered to the guest; the byte itself is kept.
                let _ = self.uart.write(0, byte);
            }
        }
    }

    /// Reads register `offset` (0 to 7).
    pub fn read(&mut self, offset: u16) -> u8 {
        self.drain();
        let value = self.uart.read(offset as u8);
        if offset == 0 && !self.waiting.is_empty() {
            let rest = std::mem::take(&mut self.waiting);
            self.input(&rest);
        }
        if offset == LSR && !self.by_interrupt {
            self.set_coalesced(true);
            self.arm();
        }
        value
    }

    /// Writes register `offset` (0 to 7).
    pub fn write(&mut self, offset: u16, value: u8) {
        self.drain();
        // A failed interrupt trigger can't be answered to the guest; the byte itself is kept.
        let _ = self.uart.write(offset as u8, value);
        match offset {
            IER => {
                // Behind the divisor latch this is another register; a wrong guess costs exits, or the guest a byte's delay.
                self.by_interrupt = value & IER_THRI != 0;
                if self.by_interrupt {
                    self.set_coalesced(false);
                }
            }
            0 if !self.uart.writer().buffer.is_empty() => self.arm(),
            _ => {}
        }
    }

    fn set_coalesced(&mut self, on: bool) {
        if let Some(coalesced) = &mut self.coalesced {
            coalesced.set(on);
        }
    }

    /// Has the main loop call [`SerialPort::flush`] soon.
    fn arm(&mut self) {
        if !self.armed {
            self.armed = true;
            self.timer.arm(HALF_LINE);
        }
    }

    /// Hands user input to the guest; what does not fit the FIFO waits.
    pub fn input(&mut self, bytes: &[u8]) {
        let taken = if self.waiting.is_empty() { self.uart.enqueue_raw_bytes(bytes).unwrap_or(0) } else { 0 };
        self.waiting.extend_from_slice(&bytes[taken.min(bytes.len())..]);
    }

    /// Writes out half a line that has waited long enough.
    pub fn flush(&mut self) {
        self.timer.clear();
        self.armed = false;
        self.drain();
        self.uart.writer_mut().send();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Edges(AtomicU32);

    impl IrqLine for Edges {
        fn pulse(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn port() -> (SerialPort, PipeReader, Arc<Edges>) {
        let (rx, tx) = io::pipe().unwrap();
        let line = Arc::new(Edges::default());
        let out = Arc::new(File::from(OwnedFd::from(tx)));
        (SerialPort::new(line.clone(), out, Arc::new(Timer::new().unwrap())), rx, line)
    }

    #[test]
    fn output_goes_out_a_line_at_a_time() {
        let (mut port, mut rx, _) = port();
        let mut got = [0u8; 64];
        for &b in b"hi" {
            port.write(0, b);
        }
        assert_eq!(port.uart.writer().buffer, b"hi", "half a line waits");
        port.write(0, b'\n');
        assert_eq!(rx.read(&mut got).unwrap(), 3);
        assert_eq!(&got[..3], b"hi\n");
        port.write(0, b'>');
        port.flush();
        assert_eq!(rx.read(&mut got).unwrap(), 1);
    }

    #[test]
    fn input_past_the_fifo_waits_and_keeps_its_order() {
        let (mut port, _rx, line) = port();
        port.write(1, 1); // receive interrupt on
        let sent: Vec<u8> = (0..200).collect();
        port.input(&sent[..150]);
        port.input(&sent[150..]);
        assert!(line.0.load(Ordering::SeqCst) > 0);
        let mut got = Vec::new();
        while port.read(5) & 1 != 0 {
            got.push(port.read(0));
        }
        assert_eq!(got, sent);
    }
}
