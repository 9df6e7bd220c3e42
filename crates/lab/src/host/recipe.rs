// SPDX-License-Identifier: Apache-2.0
//! What the guests' Debian and the lab machine are made of. Everything here goes into the keys of what is built.
//!
//! Data only: `image` cooks it. Package *versions* are what the machine's apt gives on the day of the build; they are
//! written down beside the image.

use super::cache::Key;

/// Debian release of everything.
pub const RELEASE: &str = "bookworm";
/// The stock kernel, for the lab machine and its guests.
pub const KERNEL: &str = "linux-image-cloud-amd64";
/// Raise when a builder changes in a way that its ingredients don't show.
const EDITION: &str = "1";

/// The guests' root: stock Debian with an init system, and the workloads.
pub const GUEST_PACKAGES: &[&str] = &[
    KERNEL,
    "initramfs-tools",
    "zstd",
    "systemd",
    "systemd-sysv",
    "udev",
    "dbus",
    "kmod",
    "iproute2",
    "e2fsprogs",
    "procps",
    "sysbench",
    "fio",
    "iperf3",
];

/// The lab machine's root: the peers, the workloads and what it takes to look at them.
pub const MACHINE_PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "qemu-utils",
    "sysbench",
    "busybox-static",
    "dnsmasq-base",
    "kmod",
    "iproute2",
    "nftables",
    "e2fsprogs",
    "iperf3",
    "passt",
    "procps",
    "util-linux",
    "strace",
    "socat",
];

/// Parts of the lab machine's root that nothing there reads: they would only sit in its memory.
pub const MACHINE_DROPS: &[&str] = &[
    "boot",
    "usr/include",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl",
    "usr/lib/x86_64-linux-gnu/perl-base",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl",
    "usr/share/perl5",
    "usr/share/zoneinfo",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg/info",
    "var/log",
];

/// First program of the lab machine.
pub const INIT: &str = include_str!("../../../../lab/l1-init.sh");
/// Its kernel modules.
pub const MODULES: &str = include_str!("../../../../lab/l1-modules");

/// Bytes of the guests' root disk: what Debian takes and room for a workload's files.
pub const GUEST_DISK: u64 = 3 << 30;
/// Bytes of the lab machine's disk in memory (sparse).
pub const MACHINE_DISK: u64 = 5 << 30;
/// Bytes of the lab machine's memory (sparse, copy-on-write).
pub const MACHINE_MEMORY: u64 = 6 << 30;
/// The same of the machine with devices to hand on, where a guest of 8 GiB has all of its memory pinned.
pub const MACHINE_MEMORY_PASSTHROUGH: u64 = 12 << 30;

/// Names of the kernel modules, in order.
pub fn module_names() -> impl Iterator<Item = &'static str> {
    MODULES.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_whitespace().next())
}

/// Key of the guests' root, and of the lab machine's modules, which are taken out of it.
#[must_use]
pub fn guest_key() -> Key {
    Key::default()
        .with("edition", EDITION)
        .with("release", RELEASE)
        .with("packages", GUEST_PACKAGES.join(" "))
        .with("disk", GUEST_DISK.to_string())
        .with("modules", module_names().collect::<Vec<_>>().join(" "))
}

/// Key of the lab machine's Debian before anything is dropped from it or added.
#[must_use]
pub fn machine_base_key() -> Key {
    Key::default().with("edition", EDITION).with("release", RELEASE).with("packages", MACHINE_PACKAGES.join(" "))
}

/// Key of the lab machine's root.
#[must_use]
pub fn machine_key() -> Key {
    Key::default()
        .with("base", machine_base_key().name())
        .with("guest", guest_key().name())
        .with("drops", MACHINE_DROPS.join(" "))
        .with("init", INIT)
        .with("modules", MODULES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_what_the_lab_cannot_do_without() {
        let modules: Vec<_> = module_names().collect();
        assert!(modules.contains(&"kvm-amd") && modules.contains(&"brd"), "{modules:?}");
        assert!(modules.iter().all(|name| !name.starts_with('#')));
        assert!(
            modules.contains(&"nft-masq") && MACHINE_PACKAGES.contains(&"nftables"),
            "suite irq-load goes over NAT"
        );
        assert!(GUEST_PACKAGES.contains(&KERNEL) && GUEST_PACKAGES.contains(&"sysbench"));
        assert!(MACHINE_PACKAGES.contains(&"qemu-system-x86"));
        assert!(MACHINE_DROPS.iter().all(|path| !path.starts_with('/') && !path.contains("..")));
        assert_ne!(guest_key().name(), machine_key().name());
    }
}
