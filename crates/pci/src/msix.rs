// SPDX-License-Identifier: Apache-2.0
//! MSI-X (PCI Local Bus 3.0, 6.8.2): the table and pending bits as the guest sees them, and lines that device threads
//! signal without a lock.
//!
//! The table belongs to a function and is touched under that function's lock on vCPU threads. Lines are shared: a device
//! thread looks at one atomic and writes one eventfd. Masking costs no routing change: the line remembers what came
//! while it was masked and the vector is routed again only when its message changed. A line whose eventfd went to the
//! host's kernel can't ask it to look: its vector holds what the kernel writes while the line is masked.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use irq::{MsiMessage, MsiVector};

/// Capability id.
pub const CAPABILITY: u8 = 0x11;
/// Bytes of one table entry.
pub const ENTRY_SIZE: u64 = 16;
/// Message control: MSI-X is on.
const ENABLE: u16 = 1 << 15;
/// Message control: all vectors are masked.
const FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: this vector is masked.
const MASKED: u32 = 1;

/// MSI-X is off: signals are dropped.
const OFF: u8 = 0;
/// Signals are kept as a pending bit.
const HELD: u8 = 1;
/// Signals are sent.
const LIVE: u8 = 2;

/// One vector as its device signals it.
pub struct MsixLine {
    state: AtomicU8,
    pending: AtomicBool,
    /// Somebody writes to the vector's eventfd without a look at `state`.
    lent: AtomicBool,
    vector: Arc<dyn MsiVector>,
}

impl MsixLine {
    /// Sends the message, or keeps it pending while masked. `false`: MSI-X is off, nothing was sent.
    #[inline]
    pub fn notify(&self) -> bool {
        match self.state.load(Ordering::Acquire) {
            LIVE => self.vector.notify(),
            HELD => {
                self.pending.store(true, Ordering::SeqCst);
                // An unmask may have come between the two: whoever takes the pending bit sends.
                if self.state.load(Ordering::SeqCst) == LIVE && self.pending.swap(false, Ordering::SeqCst) {
                    self.vector.notify();
                }
            }
            _ => return false,
        }
        true
    }

    /// The vector's eventfd, to be written by the host's kernel: masks and pending bits hold for what it writes. `None` while
    /// MSI-X is off, or where there is none. Called under the function's lock.
    pub fn lend(&self) -> Option<RawFd> {
        let state = self.state.load(Ordering::SeqCst);
        let fd = self.vector.fd().filter(|_| state != OFF)?;
        if !self.lent.swap(true, Ordering::SeqCst) && state == HELD {
            self.vector.hold(true).ok()?;
        }
        Some(fd)
    }

    fn is_pending(&self) -> bool {
        let held = self.lent.load(Ordering::SeqCst) && self.state.load(Ordering::SeqCst) == HELD;
        self.pending.load(Ordering::SeqCst) || held && self.vector.is_pending()
    }

    /// Lets a lent eventfd's writes through, or not.
    fn hold(&self, held: bool) -> bool {
        !self.lent.load(Ordering::SeqCst) || self.vector.hold(held).is_ok()
    }
}

/// One table entry.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    words: [u32; 4],
    /// The message that the vector was last routed to.
    routed: Option<MsiMessage>,
}

impl Entry {
    fn message(&self) -> MsiMessage {
        let [low, high, data, _] = self.words;
        MsiMessage { address: u64::from(high) << 32 | u64::from(low & !0b11), data }
    }

    const fn masked(&self) -> bool {
        self.words[3] & MASKED != 0
    }
}

/// The MSI-X table and pending bits of one function.
pub struct Msix {
    entries: Vec<Entry>,
    lines: Arc<[MsixLine]>,
    control: u16,
}

impl Msix {
    /// A table with one entry for each of `vectors`: all masked, MSI-X off. At most 2048 vectors count.
    #[must_use]
    pub fn new(vectors: Vec<Arc<dyn MsiVector>>) -> Self {
        let lines: Arc<[MsixLine]> = vectors
            .into_iter()
            .take(2048)
            .map(|vector| MsixLine {
                state: AtomicU8::new(OFF),
                pending: AtomicBool::new(false),
                lent: AtomicBool::new(false),
                vector,
            })
            .collect();
        let mut msix = Self { entries: vec![Entry::default(); lines.len()], lines, control: 0 };
        msix.clear();
        msix
    }

    fn clear(&mut self) {
        self.control = 0;
        for entry in &mut self.entries {
            entry.words = [0, 0, 0, MASKED];
        }
    }

    /// What device threads signal, one line a vector.
    #[must_use]
    pub fn lines(&self) -> Arc<[MsixLine]> {
        Arc::clone(&self.lines)
    }

    /// The capability's body and writable bits, for a table and pending bits at these offsets of BAR `bar` (multiples of 8).
    #[must_use]
    pub fn capability(&self, bar: u8, table: u32, pending: u32) -> ([u8; 10], [u8; 2]) {
        let mut body = [0; 10];
        let last = (self.entries.len().max(1) - 1) as u16;
        body[..2].copy_from_slice(&last.to_le_bytes());
        body[2..6].copy_from_slice(&(table | u32::from(bar)).to_le_bytes());
        body[6..].copy_from_slice(&(pending | u32::from(bar)).to_le_bytes());
        (body, (ENABLE | FUNCTION_MASK).to_le_bytes())
    }

    /// One past the last entry that is not masked.
    #[must_use]
    pub fn used(&self) -> usize {
        self.entries.iter().rposition(|entry| !entry.masked()).map_or(0, |last| last + 1)
    }

    /// Takes the message control word after the guest wrote it.
    pub fn set_control(&mut self, control: u16) {
        if control == self.control {
            return;
        }
        self.control = control;
        for index in 0..self.entries.len() {
            self.refresh(index);
        }
    }

    /// Reads the table; whole aligned dwords, anything else reads as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !offset.is_multiple_of(4) {
            return;
        }
        for (i, chunk) in data.chunks_exact_mut(4).enumerate() {
            if let Some(word) = self.word(offset + i as u64 * 4) {
                chunk.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    fn word(&self, offset: u64) -> Option<u32> {
        let entry = self.entries.get(usize::try_from(offset / ENTRY_SIZE).ok()?)?;
        entry.words.get((offset % ENTRY_SIZE / 4) as usize).copied()
    }

    /// Writes the table; whole aligned dwords, anything else is ignored.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) {
            return;
        }
        let (first, mut touched) = (offset / ENTRY_SIZE, None);
        for (i, chunk) in data.chunks_exact(4).enumerate() {
            let at = offset + i as u64 * 4;
            let index = usize::try_from(at / ENTRY_SIZE).unwrap_or(usize::MAX);
            let field = (at % ENTRY_SIZE / 4) as usize;
            let Some(word) = self.entries.get_mut(index).and_then(|e| e.words.get_mut(field)) else { return };
            let mut bytes = [0; 4];
            bytes.copy_from_slice(chunk);
            let value = u32::from_le_bytes(bytes);
            *word = if field == 3 { value & MASKED } else { value };
            touched = Some(index);
        }
        // A write of at most 8 bytes touches at most two entries.
        if let Some(last) = touched {
            for index in usize::try_from(first).unwrap_or(last)..=last {
                self.refresh(index);
            }
        }
    }

    /// Reads the pending bits.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let first = offset.saturating_add(i as u64).saturating_mul(8);
            let first = usize::try_from(first).unwrap_or(usize::MAX);
            *byte = self
                .lines
                .iter()
                .skip(first)
                .take(8)
                .enumerate()
                .fold(0, |bits, (bit, line)| bits | u8::from(line.is_pending()) << bit);
        }
    }

    /// Puts line `index` into the state that table and control ask for.
    fn refresh(&mut self, index: usize) {
        let (Some(entry), Some(line)) = (self.entries.get_mut(index), self.lines.get(index)) else { return };
        if self.control & ENABLE == 0 {
            line.state.store(OFF, Ordering::SeqCst);
            line.pending.store(false, Ordering::SeqCst);
            line.hold(true);
            return;
        }
        if self.control & FUNCTION_MASK != 0 || entry.masked() {
            line.state.store(HELD, Ordering::SeqCst);
            line.hold(true);
            return;
        }
        let message = entry.message();
        if entry.routed != Some(message) {
            // What can't be routed stays held, with its pending bit; the next write to the entry tries again.
            if line.vector.route(Some(message)).is_err() {
                line.state.store(HELD, Ordering::SeqCst);
                return;
            }
            entry.routed = Some(message);
        }
        if !line.hold(false) {
            line.state.store(HELD, Ordering::SeqCst);
            return;
        }
        line.state.store(LIVE, Ordering::SeqCst);
        if line.pending.swap(false, Ordering::SeqCst) {
            line.vector.notify();
        }
    }

    /// Back to power-on: off, all masked, vectors routed nowhere.
    pub fn reset(&mut self) {
        self.clear();
        for index in 0..self.entries.len() {
            self.refresh(index);
            if let (Some(entry), Some(line)) = (self.entries.get_mut(index), self.lines.get(index))
                && entry.routed.take().is_some()
            {
                // Taking a route away can't lack anything; should it fail, the line is off all the same.
                let _ = line.vector.route(None);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<(Vec<Option<MsiMessage>>, usize)>, Mutex<(bool, usize)>);

    impl MsiVector for Recorder {
        fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
            self.0.lock().unwrap().0.push(message);
            Ok(())
        }
        fn notify(&self) {
            self.0.lock().unwrap().1 += 1;
        }
        fn fd(&self) -> Option<RawFd> {
            Some(7)
        }
        fn hold(&self, held: bool) -> io::Result<()> {
            let mut lent = self.1.lock().unwrap();
            lent.0 = held;
            if !held {
                self.0.lock().unwrap().1 += std::mem::take(&mut lent.1);
            }
            Ok(())
        }
        fn is_pending(&self) -> bool {
            self.1.lock().unwrap().1 > 0
        }
    }

    /// The host's kernel writes to a lent eventfd.
    fn kernel_writes(r: &Recorder) {
        let mut lent = r.1.lock().unwrap();
        if lent.0 {
            lent.1 += 1;
        } else {
            r.0.lock().unwrap().1 += 1;
        }
    }

    fn table(n: usize) -> (Msix, Vec<Arc<Recorder>>) {
        let recorders: Vec<_> = (0..n).map(|_| Arc::new(Recorder::default())).collect();
        let vectors = recorders.iter().map(|r| Arc::clone(r) as Arc<dyn MsiVector>).collect();
        (Msix::new(vectors), recorders)
    }

    fn sent(r: &Recorder) -> usize {
        r.0.lock().unwrap().1
    }

    fn program(m: &mut Msix, index: u64, data: u32, masked: bool) {
        m.write_table(index * 16, &0xfee0_1000u64.to_le_bytes());
        m.write_table(index * 16 + 8, &data.to_le_bytes());
        m.write_table(index * 16 + 12, &u32::from(masked).to_le_bytes());
    }

    #[test]
    fn off_drops_masked_keeps_live_sends() {
        let (mut m, r) = table(2);
        let lines = m.lines();
        assert!(!lines[0].notify(), "off");
        m.set_control(ENABLE | FUNCTION_MASK);
        assert!(lines[0].notify());
        let mut pba = [0u8; 8];
        m.read_pending(0, &mut pba);
        assert_eq!((pba[0], sent(&r[0])), (1, 0));
        program(&mut m, 0, 0x4041, false);
        assert_eq!(sent(&r[0]), 0, "the function is still masked");
        m.set_control(ENABLE);
        assert_eq!(sent(&r[0]), 1, "the pending message goes out once");
        m.read_pending(0, &mut pba);
        assert_eq!(pba[0], 0);
        assert_eq!(r[0].0.lock().unwrap().0, [Some(MsiMessage { address: 0xfee0_1000, data: 0x4041 })]);
        lines[0].notify();
        lines[1].notify();
        assert_eq!((sent(&r[0]), sent(&r[1])), (2, 0), "vector 1 is masked since power-on");
    }

    #[test]
    fn masking_routes_only_when_the_message_changed() {
        let (mut m, r) = table(1);
        m.set_control(ENABLE);
        program(&mut m, 0, 1, false);
        for _ in 0..5 {
            program(&mut m, 0, 1, true);
            program(&mut m, 0, 1, false);
        }
        assert_eq!(r[0].0.lock().unwrap().0.len(), 1);
        m.write_table(12, &1u32.to_le_bytes());
        m.lines()[0].notify();
        program(&mut m, 0, 2, false);
        assert_eq!(r[0].0.lock().unwrap().0.len(), 2);
        assert_eq!(sent(&r[0]), 1);
        m.reset();
        assert_eq!(r[0].0.lock().unwrap().0.last(), Some(&None));
        assert!(!m.lines()[0].notify());
    }

    #[test]
    fn a_lent_line_holds_what_the_kernel_writes_while_it_is_masked() {
        let (mut m, r) = table(1);
        let lines = m.lines();
        assert_eq!(lines[0].lend(), None, "off");
        m.set_control(ENABLE);
        assert_eq!(lines[0].lend(), Some(7));
        kernel_writes(&r[0]);
        let mut pba = [0u8; 8];
        m.read_pending(0, &mut pba);
        assert_eq!((pba[0], sent(&r[0])), (1, 0), "masked since power-on");
        program(&mut m, 0, 1, false);
        assert_eq!(sent(&r[0]), 1);
        kernel_writes(&r[0]);
        assert_eq!(sent(&r[0]), 2, "live: nobody is asked");
        m.set_control(ENABLE | FUNCTION_MASK);
        kernel_writes(&r[0]);
        lines[0].notify();
        assert_eq!(sent(&r[0]), 2);
        m.set_control(ENABLE);
        assert_eq!(sent(&r[0]), 4, "the kernel's and the device's own");
        m.read_pending(0, &mut pba);
        assert_eq!(pba[0], 0);
        m.set_control(0);
        kernel_writes(&r[0]);
        assert_eq!((sent(&r[0]), lines[0].lend()), (4, None));
    }

    #[test]
    fn odd_accesses_change_nothing() {
        let (mut m, _r) = table(1);
        m.write_table(2, &[0xff; 4]);
        m.write_table(0, &[0xff; 2]);
        m.write_table(16, &[0xff; 4]);
        m.write_table(u64::MAX - 3, &[0xff; 8]);
        m.write_table(12, &[0xff; 4]);
        let mut all = [0xaa; 16];
        m.read_table(0, &mut all);
        assert_eq!(all, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], "reserved bits read as zero");
        let mut past = [0xaa; 8];
        m.read_table(u64::MAX - 7, &mut past);
        m.read_pending(u64::MAX - 1, &mut past);
        assert_eq!(past, [0; 8]);
    }
}
