// SPDX-License-Identifier: Apache-2.0
//! What a start with pinned memory is made of: files in memory can be zeroed, mapped and pinned one after the other, so that
//! each phase has a time of its own. Pinning is `mlock` over memory that is there, which takes each page as a device's DMA
//! map does.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use base::mmap::{Advice, Mmap};
use spec::Pages;

use crate::prealloc::fits;
use crate::{Options, timed};

const SIZE: u64 = 2 << 30;

pub fn run(_: &Options) {
    println!("\nphases of 2 GiB in a file in memory, one thread");
    println!(
        "    {:<8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "pages", "mmap ms", "zero ms", "fault ms", "pin ms", "zero %", "pin %"
    );
    for (pages, name) in [(Pages::Small, "4 KiB"), (Pages::Transparent, "THP"), (Pages::Huge2M, "2 MiB")] {
        match fits(SIZE, pages).then(|| once(pages)).flatten() {
            Some([mmap, zero, fault, pin]) => {
                let all = mmap + zero + fault + pin;
                let share = |part: f64| part / all * 100.0;
                println!(
                    "    {name:<8} {mmap:>10.2} {zero:>10.1} {fault:>10.1} {pin:>10.2} {:>8.1} {:>8.1}",
                    share(zero),
                    share(pin)
                );
            }
            None => println!("    {name:<8}  could not be had"),
        }
    }
}

/// Milliseconds of each phase.
fn once(pages: Pages) -> Option<[f64; 4]> {
    let huge = if pages == Pages::Huge2M { libc::MFD_HUGETLB | libc::MFD_HUGE_2MB } else { 0 };
    // SAFETY: the name is a constant with its end.
    let fd = unsafe { libc::memfd_create(c"bench".as_ptr(), libc::MFD_CLOEXEC | huge) };
    if fd < 0 {
        return None;
    }
    // SAFETY: fresh from the kernel, and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(SIZE).ok()?;
    let put = || -> Option<Mmap> {
        let map = Mmap::reserved(SIZE as usize, 2 << 20).ok()?;
        map.put(0, SIZE as usize, Some((file.as_raw_fd(), 0)), libc::MAP_SHARED).ok()?;
        let _ = map.advise(if pages == Pages::Small { Advice::NoHugePages } else { Advice::HugePages });
        Some(map)
    };
    let ms = |took: std::time::Duration| took.as_secs_f64() * 1e3;
    // Allocation is zeroing: the kernel gives no other memory. Transparent huge pages come by a fault alone, so there the
    // first mapping allocates and is thrown away; what a second one's faults cost is taken off.
    let first = put()?;
    let (done, alloc) = timed(|| {
        if pages == Pages::Transparent {
            first.populate().is_ok()
        } else {
            // SAFETY: the call takes numbers.
            unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, SIZE as libc::off_t) == 0 }
        }
    });
    drop(first);
    let (map, mmap) = timed(put);
    let map = map.filter(|_| done)?;
    let (faulted, fault) = timed(|| map.populate());
    faulted.ok()?;
    let (pinned, pin) = timed(|| {
        // SAFETY: the range is mapped; locking changes nothing of it.
        unsafe { libc::mlock(map.as_ptr().cast(), map.len()) == 0 }
    });
    let zero = if pages == Pages::Transparent { alloc.saturating_sub(fault) } else { alloc };
    pinned.then(|| [ms(mmap), ms(zero), ms(fault), ms(pin)])
}
