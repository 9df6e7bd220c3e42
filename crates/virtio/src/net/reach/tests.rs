// SPDX-License-Identifier: Apache-2.0
//! The kernel's tables against the address space, page by page, while memory comes and goes and kernels refuse.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use mem::space::{AddressSpace, Kind, ROOT, RegionId};
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

/// A kernel that keeps its table, and refuses when it is told to.
#[derive(Default)]
struct Kernel {
    runs: Mutex<Vec<Run>>,
    /// The next table.
    refuses: AtomicBool,
}

impl Reaches for Kernel {
    fn reach(&self, runs: &[Run]) -> io::Result<()> {
        if self.refuses.swap(false, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let apart = runs.windows(2).all(|pair| pair[0].guest.0 + pair[0].len <= pair[1].guest.0);
        assert!(apart && runs.len() <= MOST, "{runs:?}");
        *self.runs.lock().unwrap() = runs.to_vec();
        Ok(())
    }
}

impl Kernel {
    fn pages(&self) -> BTreeMap<u64, u64> {
        let runs = self.runs.lock().unwrap();
        let pages = |run: &Run| {
            let (guest, host) = (run.guest.0, run.host.0);
            (0..run.len / PAGE).map(move |n| (guest + n * PAGE, host + n * PAGE))
        };
        runs.iter().flat_map(pages).collect()
    }
}

fn oracle(space: &AddressSpace<u8>) -> BTreeMap<u64, u64> {
    space.read(|view| (0..PAGES).filter_map(|n| Some((n * PAGE, view.translate(Gpa(n * PAGE), PAGE)?.0))).collect())
}

#[derive(Clone, Debug)]
enum Op {
    Place(usize, u64),
    Unplace(usize),
    Join,
    Leave,
    Fail(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..8usize, 0..PAGES - 8).prop_map(|(region, page)| Op::Place(region, page)),
        3 => (0..8usize).prop_map(Op::Unplace),
        1 => Just(Op::Join),
        1 => Just(Op::Leave),
        1 => (0..3usize).prop_map(Op::Fail),
    ]
}

/// A space, regions of `ram` in it that are nowhere, and one that is no memory of this guest's.
fn regions(space: &AddressSpace<u8>, ram: &GuestRam) -> Vec<RegionId> {
    let (_, _, host) = ram.regions().next().unwrap();
    let made = space.change(|tree| {
        let mut out: Vec<RegionId> = Vec::new();
        for number in 0..6u64 {
            let kind = Kind::Ram(Hva(host.0 + number * 8 * PAGE));
            out.push(tree.region((number + 1) * PAGE, kind)?);
        }
        out.push(tree.region(4 * PAGE, Kind::Mmio(1))?);
        out.push(tree.region(4 * PAGE, Kind::Direct(Hva(host.0)))?);
        Ok(out)
    });
    made.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_kernel_reaches_what_the_guest_has(ops in prop::collection::vec(op(), 1..60)) {
        let ram = testkit_ram();
        let space = AddressSpace::<u8>::new(PAGES * PAGE);
        let regions = regions(&space, &ram);
        // A machine has memory before anybody follows it.
        space.change(|tree| tree.place(ROOT, 0, 0, regions[0])).unwrap();
        let memory = Arc::new(VhostMemory::new(&ram));
        space.listen(memory.listener()).unwrap();
        let mut joined: Vec<Arc<Kernel>> = Vec::new();
        for op in ops {
            let refused = match op {
                Op::Place(region, page) => {
                    let changed = space.change(|tree| {
                        // Where it is already, it moves.
                        let _ = tree.unplace(regions[region]);
                        tree.place(ROOT, page * PAGE, region as i32, regions[region])
                    });
                    changed.is_err()
                }
                Op::Unplace(region) => space.change(|tree| tree.unplace(regions[region])).is_err(),
                Op::Join => {
                    let kernel = Arc::new(Kernel::default());
                    memory.join(&kernel).unwrap();
                    // Once more is once.
                    memory.join(&kernel).unwrap();
                    joined.push(kernel);
                    false
                }
                Op::Leave => joined.pop().is_none(),
                Op::Fail(who) => {
                    joined.get(who).into_iter().for_each(|kernel| kernel.refuses.store(true, Ordering::Relaxed));
                    false
                }
            };
            prop_assert_eq!(memory.lock().joined.iter().filter(|j| j.strong_count() > 0).count(), joined.len());
            let expected = oracle(&space);
            for (number, kernel) in joined.iter().enumerate() {
                prop_assert!(kernel.pages() == expected, "kernel {} after a change, refused: {}", number, refused);
            }
        }
    }
}

/// Memory of which the regions above are made.
fn testkit_ram() -> GuestRam {
    GuestRam::anonymous(&[(Gpa(0), 64 * PAGE)]).unwrap()
}

#[test]
fn neighbours_are_one_run_and_too_many_runs_are_refused() {
    let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
    let (_, _, host) = ram.regions().next().unwrap();
    let space = AddressSpace::<u8>::new(1 << 30);
    let memory = Arc::new(VhostMemory::new(&ram));
    let kernel = Arc::new(Kernel::default());
    memory.join(&kernel).unwrap();
    assert_eq!(*kernel.runs.lock().unwrap(), [Run { guest: Gpa(0), len: 1 << 20, host }], "before it follows anything");
    space.listen(memory.listener()).unwrap();
    let place = |number: u64, at: u64| {
        space.change(|tree| {
            let region = tree.region(PAGE, Kind::Ram(Hva(host.0 + number * PAGE)))?;
            tree.place(ROOT, at, 0, region)
        })
    };
    for number in 0..100 {
        place(number, number * PAGE).unwrap();
    }
    assert_eq!(*kernel.runs.lock().unwrap(), [Run { guest: Gpa(0), len: 100 * PAGE, host }]);
    for number in 0..63 {
        place(100 + number, (200 + 2 * number) * PAGE).unwrap();
    }
    let refused = place(200, 500 * PAGE).unwrap_err().to_string();
    assert!(refused.contains("vhost-net takes 64 pieces of memory, and these are 65"), "{refused}");
    assert_eq!(kernel.runs.lock().unwrap().len(), 64, "as before");
}
