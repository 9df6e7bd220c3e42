// SPDX-License-Identifier: Apache-2.0
//! Whether a description makes sense by itself, before anything is opened. Called by the command line once flags and
//! file are merged; what the host can give (memory, KVM's limits, files) is looked at elsewhere.

use crate::{Cpus, Disk, Memory, SpecError, Vm, show_size};

/// Most virtual CPUs of one machine.
pub const MAX_CPUS: u8 = 64;
/// Least guest memory in bytes: a distribution kernel doesn't unpack in less.
pub const MIN_MEMORY: u64 = 16 << 20;
/// Most guest memory in bytes; keeps every guest address below the 46 bits that all 64-bit hosts have.
pub const MAX_MEMORY: u64 = 16 << 40;
/// Most disks: bus 0 has 32 slots, and the bridge, the console, the entropy device and what comes later need some.
pub const MAX_DISKS: usize = 24;
/// Longest disk serial number in bytes (virtio 1.2, 5.2.6: the id string).
pub const MAX_SERIAL: usize = 20;
/// Longest command line in bytes (x86 kernels keep 2048 with the final zero).
pub const MAX_CMDLINE: usize = 2047;

const PAGE: u64 = 4096;

fn out_of_range(place: impl Into<String>, what: impl Into<String>, hint: impl Into<String>) -> SpecError {
    SpecError::OutOfRange { place: place.into(), what: what.into(), hint: hint.into() }
}

impl Vm {
    /// Checks every field and the fields against each other; the first thing wrong comes back.
    ///
    /// # Errors
    /// [`SpecError::OutOfRange`], whose place is the field's key.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.kernel.as_os_str().is_empty() {
            return Err(out_of_range("kernel", "the path is empty", "name a bzImage or ELF kernel"));
        }
        if self.initrd.as_ref().is_some_and(|p| p.as_os_str().is_empty()) {
            return Err(out_of_range("initrd", "the path is empty", "name a file or leave it out"));
        }
        if let Some(cmdline) = &self.cmdline {
            check_cmdline(cmdline)?;
        }
        self.cpus.check()?;
        self.memory.check()?;
        check_disks(&self.disks)
    }
}

fn check_cmdline(cmdline: &str) -> Result<(), SpecError> {
    if cmdline.len() > MAX_CMDLINE {
        let what = format!("{} bytes are too long for a kernel", cmdline.len());
        return Err(out_of_range("cmdline", what, format!("use at most {MAX_CMDLINE}")));
    }
    if cmdline.bytes().any(|b| b == 0 || b == b'\n') {
        return Err(out_of_range("cmdline", "it holds a line end or a zero byte", "write it on one line"));
    }
    Ok(())
}

impl Cpus {
    fn check(&self) -> Result<(), SpecError> {
        if !(1..=MAX_CPUS).contains(&self.count) {
            let what = format!("{} virtual CPUs can't be made", self.count);
            return Err(out_of_range("cpus", what, format!("ask for 1 to {MAX_CPUS}")));
        }
        let groups = u16::from(self.sockets) * u16::from(self.threads);
        if groups == 0 || !u16::from(self.count).is_multiple_of(groups) {
            let what = format!(
                "{} CPUs can't be split into {} sockets with {} threads a core",
                self.count, self.sockets, self.threads
            );
            return Err(out_of_range("cpus", what, "choose sockets x threads so that it divides the count"));
        }
        Ok(())
    }
}

impl Memory {
    fn check(&self) -> Result<(), SpecError> {
        let size = self.size;
        if size < MIN_MEMORY {
            let hint = if (16..=(1 << 20)).contains(&size) {
                format!("a plain number counts bytes, so for {size} MiB write {size}M")
            } else {
                format!("ask for at least {}", show_size(MIN_MEMORY))
            };
            return Err(out_of_range("memory", format!("{} is too little", show_size(size)), hint));
        }
        if size > MAX_MEMORY {
            let hint = format!("ask for at most {}", show_size(MAX_MEMORY));
            return Err(out_of_range("memory", format!("{} is too much", show_size(size)), hint));
        }
        if !size.is_multiple_of(PAGE) {
            let hint = format!("the nearest below is {}", show_size(size / PAGE * PAGE));
            return Err(out_of_range("memory", format!("{size} bytes are not a multiple of 4K"), hint));
        }
        Ok(())
    }
}

fn check_disks(disks: &[Disk]) -> Result<(), SpecError> {
    if disks.len() > MAX_DISKS {
        let what = format!("{} disks are too many", disks.len());
        return Err(out_of_range("disk", what, format!("use at most {MAX_DISKS}")));
    }
    for (index, disk) in disks.iter().enumerate() {
        disk.check()?;
        let twin = disks.iter().take(index).find(|d| d.path == disk.path);
        if twin.is_some_and(|d| !d.readonly || !disk.readonly) {
            let what = format!("{} is given twice and may be written", disk.path.display());
            return Err(out_of_range("disk", what, "give it once, or readonly=on both times"));
        }
    }
    Ok(())
}

impl Disk {
    fn check(&self) -> Result<(), SpecError> {
        if self.path.as_os_str().is_empty() {
            return Err(out_of_range("disk.path", "the path is empty", "name an image or a block device"));
        }
        let Some(serial) = &self.serial else { return Ok(()) };
        if serial.len() > MAX_SERIAL || serial.bytes().any(|b| !b.is_ascii_graphic() && b != b' ') {
            let what = format!("serial `{}` can't be shown to a guest", serial.escape_default());
            return Err(out_of_range("disk.serial", what, format!("use at most {MAX_SERIAL} ASCII characters")));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn message(change: impl FnOnce(&mut Vm)) -> String {
        let mut vm = Vm::new("vmlinuz");
        change(&mut vm);
        vm.check().unwrap_err().to_string()
    }

    #[test]
    fn accepts_the_edges() {
        for count in 1..=MAX_CPUS {
            for size in [MIN_MEMORY, 3 << 30, (3 << 30) + PAGE, MAX_MEMORY] {
                let vm = Vm {
                    cpus: Cpus { count, sockets: 1, threads: count },
                    memory: Memory { size },
                    disks: vec![Disk { serial: Some("x".repeat(MAX_SERIAL)), ..Disk::new("d") }],
                    ..Vm::new("k")
                };
                assert_eq!(vm.check(), Ok(()));
            }
        }
    }

    #[test]
    fn topology_must_divide() {
        let splits = |count, sockets, threads| Cpus { count, sockets, threads }.check().is_ok();
        for count in 0..=u8::MAX {
            for sockets in [0, 1, 2, 3, 5, 64, 255] {
                for threads in [0, 1, 2, 3, 255] {
                    let fits = (1..=64).contains(&count)
                        && sockets > 0
                        && threads > 0
                        && count % sockets == 0
                        && (count / sockets) % threads == 0;
                    assert_eq!(splits(count, sockets, threads), fits, "{count} {sockets} {threads}");
                }
            }
        }
    }

    #[test]
    fn says_what_where_and_what_to_do() {
        assert_eq!(message(|v| v.cpus.count = 65), "65 virtual CPUs can't be made: cpus; ask for 1 to 64");
        assert_eq!(
            message(|v| v.memory.size = 1024),
            "1K is too little: memory; a plain number counts bytes, so for 1024 MiB write 1024M"
        );
        assert_eq!(message(|v| v.memory.size = 8 << 20), "8M is too little: memory; ask for at least 16M");
        assert_eq!(
            message(|v| v.memory.size = (64 << 20) + 1),
            "67108865 bytes are not a multiple of 4K: memory; the nearest below is 64M"
        );
        assert!(message(|v| v.memory.size = MAX_MEMORY + PAGE).contains("too much: memory; ask for at most 16T"));
        assert!(message(|v| v.cmdline = Some("x".repeat(2048))).contains("cmdline; use at most 2047"));
        assert!(message(|v| v.cmdline = Some("a\nb".into())).contains("cmdline; write it on one line"));
        assert!(
            message(|v| v.disks = vec![Disk::new("a"), Disk { readonly: true, ..Disk::new("a") }]).contains("twice")
        );
        assert!(message(|v| v.disks = vec![Disk::new("a"); 25]).contains("25 disks are too many"));
        assert!(
            message(|v| v.disks = vec![Disk { serial: Some("ü".into()), ..Disk::new("a") }]).contains("disk.serial")
        );
        assert!(message(|v| v.kernel = "".into()).contains("kernel"));
    }

    #[test]
    fn a_shared_read_only_disk_is_fine() {
        let shared = Disk { readonly: true, ..Disk::new("a") };
        assert_eq!(Vm { disks: vec![shared.clone(), shared], ..Vm::new("k") }.check(), Ok(()));
    }
}
