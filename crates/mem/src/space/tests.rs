// SPDX-License-Identifier: Apache-2.0
//! Address spaces against a naive oracle that asks the tree for each byte, and slots against a KVM that refuses whatever
//! the real one would.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use base::{EFD_NONBLOCK, EventFd, Gpa, Hva};
use proptest::prelude::*;

use super::*;

/// Bytes of the space that the tests look at, each of them. A page is 4 KiB to the slots, so slot tests scale by it.
const SPACE: u64 = 192;

/// One random edit.
#[derive(Clone, Debug)]
enum Edit {
    Make { size: u64, kind: u8, of: usize, offset: u64 },
    Place { parent: usize, child: usize, at: u64, priority: i32 },
    Unplace { child: usize },
    Forget { region: usize },
    Log { region: usize, on: bool },
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = prop_oneof![
        4 => (1..SPACE, 0..7u8, 0..16usize, 0..SPACE).prop_map(|(size, kind, of, offset)| Edit::Make { size, kind, of, offset }),
        6 => (0..16usize, 0..16usize, 0..SPACE, -2..3i32)
            .prop_map(|(parent, child, at, priority)| Edit::Place { parent, child, at, priority }),
        2 => (0..16usize).prop_map(|child| Edit::Unplace { child }),
        1 => (0..16usize).prop_map(|region| Edit::Forget { region }),
        1 => (0..16usize, any::<bool>()).prop_map(|(region, on)| Edit::Log { region, on }),
    ];
    prop::collection::vec(edit, 1..60)
}

/// Does one edit; refused ones are part of the game.
fn edit(tree: &mut Tree<u32>, regions: &mut Vec<RegionId>, edit: &Edit, scale: u64) {
    let pick = |n: usize| regions.get(n % regions.len()).copied().unwrap();
    match *edit {
        Edit::Make { size, kind, of, offset } => {
            // Few enough that an alias of an alias stays cheap.
            if regions.len() >= 16 {
                return;
            }
            let number = regions.len() as u32;
            let host = Hva(0x7000_0000_0000 + (u64::from(number) << 32));
            let kind = match kind {
                0 => Kind::Container,
                1 | 2 => Kind::Ram(host),
                3 => Kind::Rom(host, number, 0),
                4 => Kind::Mmio(number),
                _ => Kind::Alias { of: pick(of), offset: offset * scale, readonly: kind == 6 },
            };
            regions.extend(tree.region(size * scale, kind).ok());
        }
        Edit::Place { parent, child, at, priority } => {
            drop(tree.place(pick(parent), at * scale, priority, pick(child)))
        }
        Edit::Unplace { child } => drop(tree.unplace(pick(child))),
        Edit::Forget { region } => {
            let id = pick(region);
            if tree.forget(id).is_ok() {
                regions.retain(|r| *r != id);
            }
        }
        Edit::Log { region, on } => drop(tree.set_log(pick(region), on)),
    }
}

/// Who answers at one address, as a person would find out: region, byte in it, host address, read-only, noted.
type Answer = (RegionId, u64, Option<u64>, bool, bool);

/// Asks region `id` for its byte at `at`.
fn ask(tree: &Tree<u32>, id: RegionId, at: u64, readonly: bool) -> Option<Answer> {
    let region = tree.get(id).ok()?;
    if at >= region.size {
        return None;
    }
    if let Kind::Alias { of, offset, readonly: masked } = region.kind {
        return ask(tree, of, at.checked_add(offset)?, readonly || masked);
    }
    for (start, child) in tree.children(id) {
        if let Some(answer) = at.checked_sub(start).and_then(|at| ask(tree, child, at, readonly)) {
            return Some(answer);
        }
    }
    match region.kind {
        Kind::Ram(host) | Kind::Direct(host) => Some((id, at, Some(host.0 + at), readonly, region.log)),
        Kind::Rom(host, ..) => Some((id, at, Some(host.0 + at), true, region.log)),
        Kind::Mmio(_) => Some((id, at, None, false, region.log)),
        Kind::Container | Kind::Alias { .. } => None,
    }
}

fn found(view: &FlatView<u32>, at: u64) -> Option<Answer> {
    let range = view.find(at)?;
    let skip = at - range.start;
    let memory = range.memory();
    let host = memory.map(|(host, _)| host.0 + skip);
    Some((range.region, range.offset + skip, host, memory.is_some_and(|(_, writable)| !writable), range.log))
}

/// A KVM that keeps to the real one's rules: no overlap, no number used twice, only the log of a slot may change.
#[derive(Default)]
struct Strict {
    slots: BTreeMap<u32, MemorySlot>,
    /// Calls until one is refused.
    patience: Option<u32>,
}

#[derive(Clone, Default)]
struct FakeKvm(Arc<Mutex<Strict>>);

impl FakeKvm {
    fn spent(&self) -> io::Result<()> {
        let mut kvm = self.0.lock().unwrap();
        match &mut kvm.patience {
            Some(0) => {
                kvm.patience = None;
                Err(io::Error::from_raw_os_error(libc::ENOMEM))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn by_address(&self) -> BTreeMap<u64, MemorySlot> {
        self.0.lock().unwrap().slots.values().map(|slot| (slot.at.0, *slot)).collect()
    }
}

impl SlotSink for FakeKvm {
    fn set(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
        self.spent()?;
        let mut kvm = self.0.lock().unwrap();
        assert!(slot.size > 0 && (slot.at.0 | slot.size | slot.host.0).is_multiple_of(4096), "{slot:?}");
        for (other, is) in &kvm.slots {
            let apart = slot.at.0 + slot.size <= is.at.0 || is.at.0 + is.size <= slot.at.0;
            assert!(apart || *other == number, "{slot:?} overlaps {is:?}");
        }
        if let Some(is) = kvm.slots.get(&number) {
            assert_eq!(MemorySlot { log: slot.log, ..*is }, *slot, "only the log may change");
        }
        kvm.slots.insert(number, *slot);
        Ok(())
    }

    fn remove(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
        self.spent()?;
        assert_eq!(self.0.lock().unwrap().slots.remove(&number), Some(*slot), "a slot that is there");
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn a_flat_view_answers_as_the_tree_does_byte_by_byte(edits in edits()) {
        let mut tree = Tree::new(SPACE);
        let mut regions = vec![ROOT];
        for e in &edits {
            edit(&mut tree, &mut regions, e, 1);
        }
        let view = FlatView::render(&tree);
        for at in 0..SPACE + 8 {
            prop_assert_eq!(found(&view, at), ask(&tree, ROOT, at, false), "at {}", at);
        }
        for pair in view.ranges().windows(2) {
            prop_assert!(pair[0].end() <= pair[1].start, "sorted and apart");
        }
    }

    #[test]
    fn after_any_transactions_slots_are_those_of_a_fresh_rendering(
        edits in edits(),
        size in 1..8usize,
        refusals in prop::collection::vec(prop::option::weighted(0.3, 0..6u32), 60),
    ) {
        let kvm = FakeKvm::default();
        // Half pages, so that some ends fall inside one.
        let space = AddressSpace::new(SPACE * 2048);
        space.listen(Box::new(Slots::new(kvm.clone(), 400))).unwrap();
        let mut regions = vec![ROOT];
        for (batch, refuse) in edits.chunks(size).zip(&refusals) {
            let before = (regions.clone(), kvm.by_address());
            kvm.0.lock().unwrap().patience = *refuse;
            let done = space.change(|tree| {
                batch.iter().for_each(|e| edit(tree, &mut regions, e, 2048));
                Ok(())
            });
            kvm.0.lock().unwrap().patience = None;
            if done.is_err() {
                regions.clone_from(&before.0);
                prop_assert_eq!(kvm.by_address(), before.1, "nothing happened");
            }
            let fresh = FakeKvm::default();
            let writer = space.writer();
            let view = FlatView::render(&writer.tree);
            let mut slots = Slots::new(fresh.clone(), 400);
            slots.apply(&Change::between(&FlatView::empty(), &view)).unwrap();
            prop_assert_eq!(kvm.by_address(), fresh.by_address());
            for at in (0..SPACE * 2048).step_by(512) {
                prop_assert_eq!(space.read(|v| found(v, at)), found(&view, at), "what readers see");
            }
        }
    }
}

#[test]
fn the_later_of_equal_priorities_wins_and_gives_way() {
    let space: AddressSpace<u32> = AddressSpace::new(0x1000);
    let who = |at| space.read(|v| v.find(at).map(|r| r.region));
    let (low, high) = space
        .change(|tree| {
            let low = tree.region(0x100, Kind::Mmio(1))?;
            let high = tree.region(0x80, Kind::Mmio(2))?;
            tree.place(ROOT, 0x100, 0, low)?;
            tree.place(ROOT, 0x140, 0, high)?;
            Ok((low, high))
        })
        .unwrap();
    assert_eq!([who(0xff), who(0x100), who(0x13f)], [None, Some(low), Some(low)]);
    assert_eq!([who(0x140), who(0x1bf), who(0x1c0), who(0x200)], [Some(high), Some(high), Some(low), None]);
    space.change(|tree| tree.unplace(high)).unwrap();
    assert_eq!(who(0x140), Some(low));
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let space: AddressSpace<u32> = AddressSpace::new(0x1000);
    let a = space
        .change(|tree| {
            let a = tree.region(0x100, Kind::Container)?;
            tree.place(ROOT, 0, 0, a)?;
            Ok(a)
        })
        .unwrap();
    let twice = space.change(|tree| tree.place(ROOT, 0x100, 0, a));
    assert!(matches!(twice, Err(SpaceError::Placed(_))));
    let itself = space.change(|tree| {
        let b = tree.region(0x100, Kind::Alias { of: a, offset: 0, readonly: false })?;
        tree.place(a, 0, 0, b)
    });
    assert!(matches!(itself, Err(SpaceError::Cycle(_))));
    let beyond = space.change(|tree| {
        let b = tree.region(u64::MAX, Kind::Mmio(1))?;
        tree.place(ROOT, 0x100, 0, b)
    });
    assert!(matches!(beyond, Err(SpaceError::Outside { .. })));
    assert!(space.change(|tree| tree.region(0, Kind::Mmio(1))).is_err());
    assert!(space.change(|tree| tree.forget(a)).is_err(), "it is in use");
    assert!(space.read(|v| v.ranges().is_empty()));
}

#[test]
fn doorbells_follow_their_region_and_are_heard_where_it_is_seen() {
    /// Address and value of each that is answered.
    type Rung = Vec<(u64, Option<u32>)>;
    struct Bells(Arc<Mutex<Rung>>);
    impl Listener<u32> for Bells {
        fn apply(&mut self, change: &Change<'_, u32>) -> Result<(), SpaceError> {
            let mut rung = self.0.lock().unwrap();
            for gone in &change.unbelled {
                let at = rung.iter().position(|b| *b == (gone.at.0, gone.value)).unwrap();
                rung.remove(at);
            }
            rung.extend(change.belled.iter().map(|b| (b.at.0, b.value)));
            rung.sort_unstable();
            Ok(())
        }
    }
    let (space, heard) = (AddressSpace::new(0x1_0000), Arc::new(Mutex::new(Vec::new())));
    space.listen(Box::new(Bells(heard.clone()))).unwrap();
    let fd = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let bell = |offset, value| Doorbell { offset, value, fd: fd.clone() };
    let bar = space
        .change(|tree| {
            let bar = tree.device(0x1000, Kind::Mmio(1), vec![bell(0x100, None), bell(0x200, Some(3))])?;
            tree.place(ROOT, 0x4000, 0, bar)?;
            Ok(bar)
        })
        .unwrap();
    assert_eq!(*heard.lock().unwrap(), [(0x4100, None), (0x4200, Some(3))]);
    let cover = space
        .change(|tree| {
            let cover = tree.region(0x180, Kind::Mmio(2))?;
            tree.place(ROOT, 0x4000, 1, cover)?;
            Ok(cover)
        })
        .unwrap();
    assert_eq!(*heard.lock().unwrap(), [(0x4200, Some(3))], "one is covered");
    space
        .change(|tree| {
            tree.unplace(cover)?;
            tree.unplace(bar)?;
            tree.place(ROOT, 0x8000, 0, bar)
        })
        .unwrap();
    assert_eq!(*heard.lock().unwrap(), [(0x8100, None), (0x8200, Some(3))]);
}

#[test]
fn numbers_run_out_and_nothing_has_happened() {
    let kvm = FakeKvm::default();
    let space: AddressSpace<u32> = AddressSpace::new(1 << 40);
    space.listen(Box::new(Slots::new(kvm.clone(), 2))).unwrap();
    let add = |n: u64| {
        space.change(|tree| {
            let ram = tree.region(0x2000, Kind::Ram(Hva(n << 32)))?;
            tree.place(ROOT, n << 20, 0, ram)?;
            Ok(ram)
        })
    };
    let first = add(1).unwrap();
    add(2).unwrap();
    let full = add(3).unwrap_err().to_string();
    assert_eq!(full, "cannot make a memory slot at 0x300000: all 2 memory slots of this host's KVM are in use");
    assert_eq!(space.read(|v| v.translate(Gpa(3 << 20), 1)), None);
    space.change(|tree| tree.unplace(first)).unwrap();
    add(3).unwrap();
    assert_eq!(space.read(|v| v.translate(Gpa((3 << 20) + 0x1fff), 1)), Some(Hva((3 << 32) + 0x1fff)));
    assert_eq!(space.read(|v| v.translate(Gpa((3 << 20) + 0x1fff), 2)), None, "never past the end");
    assert_eq!(kvm.by_address().len(), 2);
}

#[test]
fn as_many_slots_as_any_kvm_has_are_all_found() {
    /// Numbers in use.
    #[derive(Clone, Default)]
    struct Numbers(Arc<Mutex<BTreeMap<u32, u64>>>);
    impl SlotSink for Numbers {
        fn set(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
            assert_eq!(self.0.lock().unwrap().insert(number, slot.at.0), None, "a number used twice");
            Ok(())
        }

        fn remove(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
            assert_eq!(self.0.lock().unwrap().remove(&number), Some(slot.at.0));
            Ok(())
        }
    }
    for count in [1u32, 32, 509, 32_764] {
        let (numbers, space) = (Numbers::default(), AddressSpace::<u32>::new(1 << 40));
        space.listen(Box::new(Slots::new(numbers.clone(), count))).unwrap();
        let regions: Vec<RegionId> = space
            .change(|tree| {
                let one = |n: u64| {
                    // A page between any two, so that none merge.
                    let ram = tree.region(0x1000, Kind::Ram(Hva((1 << 40) + n * 0x1000)))?;
                    tree.place(ROOT, n * 0x2000, 0, ram)?;
                    Ok(ram)
                };
                (0..u64::from(count)).map(one).collect()
            })
            .unwrap();
        assert_eq!(numbers.0.lock().unwrap().len(), count as usize);
        space.read(|view| {
            for n in 0..u64::from(count) {
                let host = (1 << 40) + n * 0x1000;
                assert_eq!(view.translate(Gpa(n * 0x2000), 0x1000), Some(Hva(host)), "{n} of {count}");
                assert_eq!(view.translate(Gpa(n * 0x2000 + 0xfff), 1), Some(Hva(host + 0xfff)), "{n} of {count}");
                assert_eq!(view.find(n * 0x2000 + 0x1000).map(|range| range.start), None, "{n} of {count}");
            }
        });
        let more = space.change(|tree| {
            let ram = tree.region(0x1000, Kind::Ram(Hva(0x1000)))?;
            tree.place(ROOT, 1 << 39, 0, ram)
        });
        assert!(more.unwrap_err().to_string().contains(&format!("all {count} memory slots")));
        space.change(|tree| regions.iter().try_for_each(|region| tree.unplace(*region))).unwrap();
        assert!(numbers.0.lock().unwrap().is_empty());
    }
}
