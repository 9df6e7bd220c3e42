// SPDX-License-Identifier: Apache-2.0
//! Gives back memory that only start-up needed: a process that runs for long with little to do should not be charged for
//! the code of its flags, its checks and its libraries' initialisation, nor for the constants and tables that these read.
//!
//! Called by `machine` once, on the main thread, when the guest has run for a moment.

/// Gives free memory of the heap back, and unmaps the pages of all code and constants in this process, its libraries' included.
/// Those stay in the host's page cache and come back, a few at a time, where the process runs on; they were never written, so
/// nothing is lost. Constants with addresses in them, which the loader wrote, are data and stay.
pub fn forget_code() {
    /// One object: the program or a library.
    unsafe extern "C" fn object(info: *mut libc::dl_phdr_info, _: libc::size_t, _: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the loader gives a valid description, whose program headers stay mapped while the object is.
        let (base, headers) = unsafe {
            let info = &*info;
            let count = usize::from(info.dlpi_phnum);
            let headers: &[libc::Elf64_Phdr] =
                if info.dlpi_phdr.is_null() { &[] } else { std::slice::from_raw_parts(info.dlpi_phdr, count) };
            (info.dlpi_addr, headers)
        };
        for header in headers {
            if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
                continue;
            }
            let start = (base + header.p_vaddr).next_multiple_of(PAGE);
            let end = (base + header.p_vaddr + header.p_memsz) & !(PAGE - 1);
            if start < end {
                // SAFETY: the range is whole pages of a private, never written mapping of a file: what is dropped is read
                // again from the file when it is touched. Where the range is not that (the kernel's own page of code), the
                // kernel refuses or has nothing to drop.
                unsafe { libc::madvise(start as *mut libc::c_void, (end - start) as usize, libc::MADV_DONTNEED) };
            }
        }
        0
    }
    // SAFETY: no preconditions; gives free memory of the heap back, such as the buffers of loading a kernel.
    unsafe { libc::malloc_trim(0) };
    // SAFETY: the callback takes what the loader gives and no data of ours.
    unsafe { libc::dl_iterate_phdr(Some(object), std::ptr::null_mut()) };
}

/// Bytes of a page.
const PAGE: u64 = 4096;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// KiB of code and constants in this process that are in memory.
    fn resident() -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut code, mut sum) = (false, 0);
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            match (words.next().unwrap_or_default(), words.next().unwrap_or_default()) {
                (range, mode) if range.contains('-') && mode.len() == 4 => code = matches!(mode, "r-xp" | "r--p"),
                ("Rss:", kib) if code => sum += kib.parse::<u64>().unwrap(),
                _ => {}
            }
        }
        sum
    }

    #[test]
    fn code_that_is_forgotten_still_runs() {
        let text: Vec<String> = (0..100).map(|n| format!("{:>8.3}", f64::from(n) / 7.0)).collect();
        let before = resident();
        forget_code();
        let again: Vec<String> = (0..100).map(|n| format!("{:>8.3}", f64::from(n) / 7.0)).collect();
        assert_eq!(text, again);
        println!("code and constants in memory: {before} KiB before, {} after", resident());
    }
}
