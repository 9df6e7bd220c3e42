// SPDX-License-Identifier: Apache-2.0
//! DMA maps against what they must be: after every change the pages of the view's RAM and no others, never two maps in one
//! place, never a moment without memory that stays.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mem::space::{AddressSpace, Kind, ROOT, RegionId};
use proptest::prelude::*;

use super::*;

/// An IOMMU that keeps the rules of the real one and says how it was used.
#[derive(Default)]
struct Iommu {
    maps: BTreeMap<u64, (u64, u64)>,
    /// How many maps may still be made before one fails.
    left: Option<usize>,
    /// Pages that must stay mapped.
    held: Vec<u64>,
    made: usize,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Iommu>>);

impl DmaSink for Shared {
    fn map(&mut self, iova: u64, host: Hva, size: u64) -> io::Result<()> {
        let mut iommu = self.0.lock().unwrap();
        assert!(size > 0 && [iova, size, host.0].iter().all(|n| n.is_multiple_of(PAGE)));
        let overlap = iommu.maps.range(..iova + size).next_back().is_some_and(|(at, (len, _))| at + len > iova);
        assert!(!overlap, "two maps at {iova:#x}");
        if let Some(left) = &mut iommu.left {
            if *left == 0 {
                // Once: on the way back there is room again for what was there.
                iommu.left = None;
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            *left -= 1;
        }
        iommu.made += 1;
        iommu.maps.insert(iova, (size, host.0));
        Ok(())
    }

    fn unmap(&mut self, iova: u64, size: u64) -> io::Result<()> {
        let mut iommu = self.0.lock().unwrap();
        let gone = iommu.maps.remove(&iova).map(|(len, _)| len);
        assert_eq!(gone, Some(size), "a map is taken away as it was made");
        let lost = iommu.held.iter().find(|page| (iova..iova + size).contains(page));
        assert_eq!(lost, None, "memory that stays");
        Ok(())
    }
}

impl Iommu {
    fn pages(&self) -> BTreeMap<u64, u64> {
        let pages = |(at, (size, host)): (&u64, &(u64, u64))| {
            let (at, host) = (*at, *host);
            (0..size / PAGE).map(move |n| (at + n * PAGE, host + n * PAGE))
        };
        self.maps.iter().flat_map(pages).collect()
    }
}

/// Page by page: where RAM is, and that of the host behind it.
fn oracle(space: &AddressSpace<u8>) -> BTreeMap<u64, u64> {
    space.read(|view| {
        let page = |at: u64| view.translate(base::Gpa(at), PAGE).map(|host| (at, host.0));
        (0..64).filter_map(|n| page(n * PAGE)).collect()
    })
}

#[derive(Clone, Debug)]
enum Op {
    Place { region: usize, page: u64, priority: i32 },
    Unplace(usize),
    Fail(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (0usize..10, 0u64..60, -2i32..3).prop_map(|(region, page, priority)| Op::Place { region, page, priority }),
        3 => (0usize..10).prop_map(Op::Unplace),
        1 => (0usize..3).prop_map(Op::Fail),
    ];
    proptest::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn maps_are_the_views_ram_after_any_change(ops in ops(), sizes in proptest::collection::vec(1u64..20, 10)) {
        let space: AddressSpace<u8> = AddressSpace::new(64 * PAGE);
        let iommu = Shared::default();
        space.listen(Box::new(DmaMaps::new(iommu.clone()))).unwrap();
        // RAM, some of it not whole pages; a device, a ROM, and memory of a device, which is no RAM.
        let regions: Vec<RegionId> = sizes.iter().enumerate().map(|(n, pages)| {
            let host = Hva(0x7000_0000 + n as u64 * 0x10_0000);
            let (size, kind) = match n {
                0 => (pages * PAGE, Kind::Mmio(0)),
                1 => (pages * PAGE, Kind::Rom(host, 1, 0)),
                2 => (pages * PAGE, Kind::Direct(host)),
                3 => (pages * PAGE + 0x200, Kind::Ram(host)),
                _ => (pages * PAGE, Kind::Ram(host)),
            };
            space.change(|tree| tree.region(size, kind)).unwrap()
        }).collect();
        for op in ops {
            let before = iommu.0.lock().unwrap().pages();
            let result = match op {
                Op::Fail(left) => { iommu.0.lock().unwrap().left = Some(left); continue }
                Op::Place { region, page, priority } => space.change(|tree| {
                    tree.unplace(regions[region])?;
                    tree.place(ROOT, page * PAGE, priority, regions[region])
                }),
                Op::Unplace(region) => space.change(|tree| tree.unplace(regions[region])),
            };
            let mut iommu = iommu.0.lock().unwrap();
            prop_assert_eq!(iommu.pages(), oracle(&space));
            if result.is_err() {
                prop_assert_eq!(iommu.pages(), before, "a refused change changed nothing");
            }
            iommu.left = None;
        }
    }
}

#[test]
fn memory_that_grows_keeps_the_maps_it_has_and_pieces_are_large() {
    let space: AddressSpace<u8> = AddressSpace::new(u64::MAX);
    let iommu = Shared::default();
    let maps = DmaMaps::new(iommu.clone());
    let mapped = maps.mapped();
    space.listen(Box::new(maps)).unwrap();
    let gib = 1 << 30;
    let ram = space
        .change(|tree| {
            let ram = tree.region(8 * gib, Kind::Ram(Hva(1 << 40)))?;
            let window = tree.region(5 * gib / 2, Kind::Alias { of: ram, offset: 0, readonly: false })?;
            tree.place(ROOT, gib / 2, 0, window)?;
            Ok(ram)
        })
        .unwrap();
    assert_eq!(iommu.0.lock().unwrap().made, 3, "cut at 1 GiB and 2 GiB");
    assert_eq!(mapped.load(Ordering::Relaxed), 5 * gib / 2);
    iommu.0.lock().unwrap().held = (0..5 * gib / 2 / PAGE).map(|n| gib / 2 + n * PAGE).step_by(512).collect();
    // The same memory goes on: one range in the view, and nothing is unmapped for it.
    space
        .change(|tree| {
            let more = tree.region(gib, Kind::Alias { of: ram, offset: 5 * gib / 2, readonly: false })?;
            tree.place(ROOT, 3 * gib, 0, more)
        })
        .unwrap();
    let ranges = space.read(|view| view.ranges().len());
    assert_eq!((ranges, iommu.0.lock().unwrap().made), (1, 4));
    assert_eq!(mapped.load(Ordering::Relaxed), 7 * gib / 2);
}

#[test]
fn a_refusal_says_how_far_it_came() {
    let space: AddressSpace<u8> = AddressSpace::new(u64::MAX);
    space
        .change(|tree| {
            let ram = tree.region(4 << 30, Kind::Ram(Hva(1 << 40)))?;
            tree.place(ROOT, 0, 0, ram)
        })
        .unwrap();
    let iommu = Shared::default();
    iommu.0.lock().unwrap().left = Some(3);
    let maps = DmaMaps::new(iommu.clone());
    let mapped = maps.mapped();
    let refused = space.listen(Box::new(maps)).unwrap_err();
    assert!(matches!(refused, SpaceError::Refused { at: 0xc000_0000, .. }), "{refused}");
    assert_eq!(mapped.load(Ordering::Relaxed), 3 << 30);
    assert!(iommu.0.lock().unwrap().maps.is_empty(), "and leaves nothing");
}
