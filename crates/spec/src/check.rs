// SPDX-License-Identifier: Apache-2.0
//! Whether a description makes sense by itself, before anything is opened. Called by the command line once flags and
//! file are merged; what the host can give (memory, KVM's limits, files) is looked at elsewhere.

use crate::{Disk, SpecError, Throttle, Vm, show_size};

/// Most virtual CPUs of one machine.
pub const MAX_CPUS: u8 = 64;
/// Most disks: bus 0 has 32 slots, and the bridge, the console, the entropy device and what comes later need some.
pub const MAX_DISKS: usize = 24;
/// Longest disk serial number in bytes (virtio 1.2, 5.2.6: the id string).
pub const MAX_SERIAL: usize = 20;
/// Longest command line in bytes (x86 kernels keep 2048 with the final zero).
pub const MAX_CMDLINE: usize = 2047;

/// Most queues of one disk.
pub const MAX_QUEUES: u16 = 32;
/// Most queues of a disk for which nobody said how many: each costs a thread, and few disks need more.
pub const DEFAULT_QUEUES: u16 = 4;
/// Largest logical block in bytes: Linux takes none larger than a page.
pub const MAX_LOGICAL_BLOCK: u32 = 4096;
/// Largest physical block in bytes.
pub const MAX_PHYSICAL_BLOCK: u32 = 2 << 20;
/// Fewest bytes a second: less would only hang a guest.
pub const MIN_BPS: u64 = 1024;

/// Ports of the debug exit.
pub const DEBUG_EXIT_PORTS: u16 = 4;

pub(crate) fn out_of_range(place: impl Into<String>, what: impl Into<String>, hint: impl Into<String>) -> SpecError {
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
        if self.debug_exit.is_some_and(|port| port > u16::MAX - (DEBUG_EXIT_PORTS - 1)) {
            let what = format!("{DEBUG_EXIT_PORTS} ports don't fit from {:#x} on", self.debug_exit.unwrap_or_default());
            return Err(out_of_range("debug-exit", what, "kvm-unit-tests use 0xf4"));
        }
        self.cpus.topology()?;
        crate::host_cpu::check(self)?;
        self.memory.check()?;
        let sockets = self.cpus.topology()?.sockets;
        if !u16::from(sockets).is_multiple_of(self.memory.nodes) {
            // The CPUs of a socket share a cache, which no kernel believes of CPUs in different nodes.
            let what = format!("{} nodes can't share {sockets} sockets of CPUs", self.memory.nodes);
            let hint = format!("give each node sockets of its own, such as --cpus N,sockets={}", self.memory.nodes);
            return Err(out_of_range("memory.nodes", what, hint));
        }
        crate::net::check(&self.nets)?;
        crate::vfio::check(&self.vfio, self.transport)?;
        check_disks(&self.disks)
    }

    /// How many queues `disk` has in this machine.
    #[must_use]
    pub fn queues(&self, disk: &Disk) -> u16 {
        disk.queues.unwrap_or_else(|| DEFAULT_QUEUES.min(self.cpus.count.into()).max(1))
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
        self.check_queues()?;
        self.check_blocks()?;
        self.throttle.check()?;
        if let Some(coalesce) = self.coalesce {
            coalesce.check("disk.coalesce")?;
        }
        let Some(serial) = &self.serial else { return Ok(()) };
        if serial.len() > MAX_SERIAL || serial.bytes().any(|b| !b.is_ascii_graphic() && b != b' ') {
            let what = format!("serial `{}` can't be shown to a guest", serial.escape_default());
            return Err(out_of_range("disk.serial", what, format!("use at most {MAX_SERIAL} ASCII characters")));
        }
        Ok(())
    }

    fn check_queues(&self) -> Result<(), SpecError> {
        match self.queues {
            Some(n) if !(1..=MAX_QUEUES).contains(&n) => {
                let what = format!("{n} queues can't be made");
                Err(out_of_range("disk.queues", what, format!("ask for 1 to {MAX_QUEUES}")))
            }
            _ => Ok(()),
        }
    }

    fn check_blocks(&self) -> Result<(), SpecError> {
        let sizes = [
            ("disk.logical-block-size", self.logical_block_size, MAX_LOGICAL_BLOCK),
            ("disk.physical-block-size", self.physical_block_size, MAX_PHYSICAL_BLOCK),
        ];
        for (place, size, most) in sizes {
            if let Some(size) = size.filter(|s| !s.is_power_of_two() || !(512..=most).contains(s)) {
                let hint = format!("use a power of two from 512 to {}", show_size(most.into()));
                return Err(out_of_range(place, format!("{size} bytes are no block"), hint));
            }
        }
        match (self.logical_block_size, self.physical_block_size) {
            (Some(logical), Some(physical)) if physical < logical => {
                let what = format!("{physical} bytes are less than a logical block of {logical}");
                Err(out_of_range("disk.physical-block-size", what, "use at least the logical size"))
            }
            _ => Ok(()),
        }
    }
}

impl Throttle {
    fn check(&self) -> Result<(), SpecError> {
        rate("disk.bps", self.bps, "disk.bps-burst", self.bps_burst, MIN_BPS)?;
        rate("disk.iops", self.iops, "disk.iops-burst", self.iops_burst, 1)
    }
}

/// Checks a rate limit and its burst; `least` is the smallest rate that is of any use.
pub(crate) fn rate(
    place: &'static str,
    rate: Option<u64>,
    burst_place: &'static str,
    burst: Option<u64>,
    least: u64,
) -> Result<(), SpecError> {
    match (rate, burst) {
        (Some(rate), _) if rate < least => {
            let hint = format!("ask for at least {least}, or leave it out for no limit");
            Err(out_of_range(place, format!("{rate} a second is too little"), hint))
        }
        (None, Some(_)) => {
            let hint = format!("say {} too", place.rsplit('.').next().unwrap_or(place));
            Err(out_of_range(burst_place, "a burst needs a rate", hint))
        }
        (_, Some(0)) => Err(out_of_range(burst_place, "a burst of 0 lets nothing pass", "ask for more")),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{MAX_MEMORY, MIN_MEMORY};

    const PAGE: u64 = 4096;
    use crate::{Cpus, FromText};

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
                    cpus: Cpus { threads: Some(count), ..Cpus::flat(count) },
                    memory: crate::Memory { size, ..crate::Memory::default() },
                    disks: vec![Disk { serial: Some("x".repeat(MAX_SERIAL)), ..Disk::new("d") }],
                    ..Vm::new("k")
                };
                assert_eq!(vm.check(), Ok(()));
            }
        }
    }

    #[test]
    fn says_what_where_and_what_to_do() {
        assert_eq!(message(|v| v.cpus.count = 65), "65 virtual CPUs can't be made: cpus; ask for 1 to 64");
        assert_eq!(
            message(|v| (v.memory.nodes, v.cpus.count) = (2, 4)),
            "2 nodes can't share 1 sockets of CPUs: memory.nodes; give each node sockets of its own, such as --cpus N,sockets=2"
        );
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
    fn what_a_disk_says_of_its_device_is_checked() {
        let says = |text: &str| match Disk::from_text(text).unwrap().check() {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        };
        for fine in [
            "d,queues=1",
            "d,queues=32,threads=shared",
            "d,logical-block-size=512,physical-block-size=2M",
            "d,logical-block-size=4K,physical-block-size=4K",
            "d,bps=1K,bps-burst=1,iops=1,iops-burst=1",
        ] {
            assert_eq!(says(fine), "", "{fine}");
        }
        assert_eq!(says("d,queues=0"), "0 queues can't be made: disk.queues; ask for 1 to 32");
        assert_eq!(says("d,queues=33"), "33 queues can't be made: disk.queues; ask for 1 to 32");
        assert_eq!(
            says("d,logical-block-size=8K"),
            "8192 bytes are no block: disk.logical-block-size; use a power of two from 512 to 4K"
        );
        assert!(says("d,logical-block-size=513").contains("513 bytes are no block"));
        assert!(says("d,physical-block-size=256").contains("256 bytes are no block: disk.physical-block-size"));
        assert!(says("d,logical-block-size=4K,physical-block-size=512").contains("less than a logical block of 4096"));
        assert_eq!(
            says("d,bps=1023"),
            "1023 a second is too little: disk.bps; ask for at least 1024, or leave it out for no limit"
        );
        assert!(says("d,iops=0").contains("0 a second is too little: disk.iops"));
        assert_eq!(says("d,iops-burst=5"), "a burst needs a rate: disk.iops-burst; say iops too");
        assert!(says("d,bps=1M,bps-burst=0").contains("a burst of 0 lets nothing pass: disk.bps-burst"));
    }

    #[test]
    fn queues_follow_the_cpus_up_to_a_few() {
        let queues = |count, said| {
            let disk = Disk { queues: said, ..Disk::new("d") };
            Vm { cpus: Cpus::flat(count), ..Vm::new("k") }.queues(&disk)
        };
        assert_eq!([1, 2, 4, 5, 64].map(|n| queues(n, None)), [1, 2, 4, 4, 4]);
        assert_eq!((queues(1, Some(8)), queues(64, Some(1))), (8, 1));
    }

    #[test]
    fn a_shared_read_only_disk_is_fine() {
        let shared = Disk { readonly: true, ..Disk::new("a") };
        assert_eq!(Vm { disks: vec![shared.clone(), shared], ..Vm::new("k") }.check(), Ok(()));
    }
}
