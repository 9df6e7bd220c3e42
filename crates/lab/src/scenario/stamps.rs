// SPDX-License-Identifier: Apache-2.0
//! The parts of a boot by the guest kernel's own clock, from the stamps of its log on the console: the same for every
//! monitor, whatever it is and however late its console shows a line.

/// The parts, in seconds and in their order.
pub const PARTS: [&str; 3] = ["before the kernel's clock", "kernel", "initrd"];

/// Splits a boot that took `total` seconds to the first line of user space: what came before the kernel's clock started
/// (the monitor, and whatever unpacked the kernel), the kernel, and unpacking the initrd. `None` without stamps (`quiet`).
/// The user space of suite `boot` says its line at once, so it has no part of its own.
pub fn parts(console: &str, total: f64) -> Option<[f64; 3]> {
    let at = |what: &[&str]| {
        console.lines().find_map(|line| {
            let (stamp, text) = line.trim_start().strip_prefix('[')?.split_once(']')?;
            let seconds: f64 = stamp.trim().parse().ok()?;
            what.iter().any(|start| text.trim_start().starts_with(start)).then_some(seconds)
        })
    };
    let user = at(&["Run /init as init process"]).filter(|user| *user <= total)?;
    let unpacked = at(&["Freeing initrd memory"]);
    let begun = at(&["Unpacking initramfs", "Trying to unpack rootfs image as initramfs"]);
    let initrd = unpacked.zip(begun).map_or(0.0, |(end, begin)| (end - begin).max(0.0));
    Some([total - user, user - initrd, initrd])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_log_becomes_parts_that_add_up() {
        let log = "junk\n[    0.000000] Linux version 6.1\n[    0.500000] Unpacking initramfs...\n\
            [    0.525000] Freeing initrd memory: 12K\n[    1.400000] Run /init as init process\n@@lab ready\n";
        let got = parts(log, 1.75).unwrap();
        for (got, want) in got.iter().zip([0.35, 1.375, 0.025]) {
            assert!((got - want).abs() < 1e-9, "{got} is not {want}");
        }
        assert_eq!(parts(log, 1.0), None, "a clock that ran ahead says nothing");
        assert_eq!(parts("@@lab ready\n", 1.75), None);
    }
}
