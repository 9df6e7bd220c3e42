// SPDX-License-Identifier: Apache-2.0
//! A guest that writes anything anywhere into configuration space, by ECAM and by ports, in any width: what a function is
//! stays, what it lets be written stays within its bounds, and whoever follows its BARs is told of every move.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use irq::{MsiMessage, MsiVector};
use pci::msix::{self, Msix};
use pci::{BarKind, BarSpec, ConfigSpace, ECAM_BUS_SIZE, Effect, Identity, PciBus, PciDevice, Placement};
use proptest::prelude::*;

/// A vector that counts, and now and then finds no room for a route.
#[derive(Default)]
struct Vector {
    sent: AtomicUsize,
    routed: AtomicUsize,
}

impl MsiVector for Vector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        match self.routed.fetch_add(1, Ordering::SeqCst) % 5 {
            4 if message.is_some() => Err(io::Error::other("the routing table is full")),
            _ => Ok(()),
        }
    }

    fn notify(&self) {
        self.sent.fetch_add(1, Ordering::SeqCst);
    }
}

/// A function with all that a configuration space can have.
struct Function {
    config: ConfigSpace,
    msix: Msix,
    msix_at: u16,
}

const BARS: [BarSpec; 4] = [
    BarSpec { bar: 0, kind: BarKind::Memory64, size: 0x4000, prefetchable: true },
    BarSpec { bar: 2, kind: BarKind::Memory32, size: 16, prefetchable: false },
    BarSpec { bar: 3, kind: BarKind::Memory64, size: 1 << 40, prefetchable: false },
    BarSpec { bar: 5, kind: BarKind::Io, size: 8, prefetchable: false },
];

impl Function {
    fn new(vectors: &[Arc<Vector>]) -> Self {
        let id = Identity {
            vendor: 0x1234,
            device: 0x5678,
            revision: 9,
            class: 0x01_80_00,
            subsystem_vendor: 0x4321,
            subsystem: 0x8765,
        };
        let mut config = ConfigSpace::new(id);
        BARS.into_iter().for_each(|bar| config.add_bar(bar));
        config.add_capability(0x09, &[6, 1, 2, 3], &[0, 0, 0xff]);
        let msix = Msix::new(vectors.iter().map(|v| Arc::clone(v) as Arc<dyn MsiVector>).collect());
        let (body, mask) = msix.capability(0, 0x2000, 0x3000);
        let msix_at = config.add_capability(msix::CAPABILITY, &body, &mask);
        Self { config, msix, msix_at }
    }
}

impl PciDevice for Function {
    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        assert!(matches!(data.len(), 1 | 2 | 4) && usize::from(offset % 4) + data.len() <= 4 && offset < 256);
        self.config.read(offset, data);
    }
    fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect {
        assert!(matches!(data.len(), 1 | 2 | 4) && usize::from(offset % 4) + data.len() <= 4 && offset < 256);
        let effect = self.config.write(offset, data);
        self.msix.set_control(self.config.get(self.msix_at + 2, 2) as u16);
        effect
    }
    fn placements(&self) -> Vec<Placement> {
        self.config.placements()
    }
    fn place(&mut self, bar: u8, address: u64) {
        self.config.place(bar, address);
    }
    fn bar_read(&mut self, _: u8, offset: u64, data: &mut [u8]) {
        self.msix.read_table(offset, data);
    }
    fn bar_write(&mut self, _: u8, offset: u64, data: &[u8]) {
        self.msix.write_table(offset, data);
    }
    fn reset(&mut self) {
        self.config.reset();
        self.msix.reset();
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Writes at an offset of the ECAM.
    Ecam(u64, Vec<u8>),
    /// Writes a port from 0xcf8 on.
    Port(u16, Vec<u8>),
    /// Writes the MSI-X table.
    Table(u64, Vec<u8>),
    /// Signals a line.
    Signal(usize),
    /// Resets the bus.
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = || proptest::collection::vec(prop_oneof![Just(0u8), Just(0xff), any::<u8>()], 0..9);
    // Mostly the function's own space, and there mostly what can be written.
    let near = prop_oneof![4u64..0x60, 0u64..0x200].prop_map(|at| 1 << 15 | at);
    let at = prop_oneof![8 => near, 1 => 0..ECAM_BUS_SIZE * 2, 1 => any::<u64>()];
    prop_oneof![
        8 => (at, bytes()).prop_map(|(at, data)| Op::Ecam(at, data)),
        2 => (0u16..12, bytes()).prop_map(|(port, data)| Op::Port(port, data)),
        1 => (0u32..0x100).prop_map(|at| Op::Port(0, (0x8000_0800 | at).to_le_bytes().to_vec())),
        3 => (prop_oneof![0u64..0x60, any::<u64>()], bytes()).prop_map(|(at, data)| Op::Table(at, data)),
        2 => (0usize..4).prop_map(Op::Signal),
        1 => Just(Op::Reset),
    ]
}

/// What no guest may change: identity, BAR kinds, capabilities and their places.
fn fixed(bus: &PciBus) -> Vec<u32> {
    let dword = |at: u64| {
        let mut word = [0; 4];
        bus.ecam_read(1 << 15 | at, &mut word);
        u32::from_le_bytes(word)
    };
    let bars = [(0x10, 0x3fff), (0x14, 0), (0x18, 0xf), (0x1c, u32::MAX), (0x20, 0xff), (0x24, 0x7)];
    let masked = [(0x04, !0x0407), (0x0c, !0xff), (0x40, !0), (0x44, 0xffff_ff00), (0x48, 0x3fff_ffff)];
    let whole = [0x00, 0x08, 0x28, 0x2c, 0x30, 0x34, 0x38, 0x4c, 0x50, 0x54, 0xfc].map(|at| (at, !0));
    bars.iter().chain(&masked).chain(&whole).map(|(at, mask)| dword(*at) & mask).collect()
}

fn run(ops: &[Op]) -> Result<(), TestCaseError> {
    let vectors: Vec<_> = (0..3).map(|_| Arc::new(Vector::default())).collect();
    let function = Arc::new(Mutex::new(Function::new(&vectors)));
    let lines = function.lock().unwrap().msix.lines();
    let mut bus = PciBus::new();
    bus.attach(function.clone()).unwrap();
    let before = fixed(&bus);
    for op in ops {
        let was = function.lock().unwrap().placements();
        let told = match op {
            Op::Ecam(at, data) => bus.ecam_write(*at, data),
            Op::Port(port, data) => bus.port_write(0xcf8 + port, data),
            Op::Table(at, data) => {
                function.lock().unwrap().bar_write(0, *at, data);
                None
            }
            Op::Signal(line) => {
                lines.get(*line).map(msix::MsixLine::notify);
                None
            }
            Op::Reset => {
                bus.reset();
                let placed = function.lock().unwrap().placements();
                prop_assert!(placed.iter().all(|p| p.address == 0 && !p.enabled));
                let sent = |v: &Vec<Arc<Vector>>| v.iter().map(|v| v.sent.load(Ordering::SeqCst)).collect::<Vec<_>>();
                let quiet = sent(&vectors);
                prop_assert!(lines.iter().all(|line| !line.notify()), "off after a reset");
                prop_assert_eq!(sent(&vectors), quiet);
                continue;
            }
        };
        let now = function.lock().unwrap().placements();
        if now != was {
            let switched = now[0].enabled != was[0].enabled;
            let expected = if switched { Effect::Decode(now[0].enabled) } else { Effect::Moved };
            prop_assert_eq!(told, Some((1, expected)), "{:?}", op);
        }
        for (place, bar) in now.iter().zip(&BARS) {
            prop_assert!(place.address.is_multiple_of(bar.size) && place.size == bar.size && place.bar == bar.bar);
            prop_assert!(bar.kind == BarKind::Memory64 || place.address <= u64::from(u32::MAX));
        }
        prop_assert_eq!(fixed(&bus), before.clone(), "{:?}", op);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_written_a_function_stays_what_it_is(ops in proptest::collection::vec(op(), 1..200)) {
        run(&ops)?;
    }
}

/// Every offset in every width, past the end of the function, the bus and the number: the same bytes as one by one.
#[test]
fn every_width_reads_the_same() {
    let mut bus = PciBus::new();
    bus.attach(Arc::new(Mutex::new(Function::new(&[Arc::default()])))).unwrap();
    let byte = |at: u64| {
        let mut byte = [0xa5];
        bus.ecam_read(at, &mut byte);
        byte[0]
    };
    for start in [0, 1 << 15, (1 << 15) + 0xf0, (1 << 15) + 0xff0 - 0x20, 2 << 15, (1 << 15) | 1 << 12] {
        for at in start..start + 0x20 {
            for width in 1..=8u64 {
                if at % 0x1000 + width > 0x1000 {
                    continue;
                }
                let mut got = vec![0xa5; width as usize];
                bus.ecam_read(at, &mut got);
                assert_eq!(got, (at..at + width).map(byte).collect::<Vec<_>>(), "{width} bytes at {at:#x}");
            }
        }
    }
    let mut past = [0; 8];
    bus.ecam_read(u64::MAX, &mut past);
    assert_eq!(past, [0xff; 8]);
}
