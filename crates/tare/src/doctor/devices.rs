// SPDX-License-Identifier: Apache-2.0
//! Devices' part of `tare doctor`: io_uring, IOMMU and VFIO, tun, vhost.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use serde_json::json;

use super::{Finding, Host};
use crate::exit::reason;

/// Looks at `host`.
pub fn look(host: &Host) -> Vec<Finding> {
    vec![uring(host, make_ring()), iommu(host), tun(host), vhost(host, "vhost.net"), vhost(host, "vhost.vsock")]
}

/// Asks the kernel for a ring of four entries and gives it back.
fn make_ring() -> io::Result<()> {
    /// `struct io_uring_params` is 120 bytes, all zero for no wishes.
    #[repr(C, align(8))]
    struct Params([u8; 120]);
    let mut params = Params([0; 120]);
    // SAFETY: the kernel reads and writes sizeof(struct io_uring_params) = 120 bytes, which params has.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.0.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call made this descriptor and nobody else owns it.
    drop(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) });
    Ok(())
}

fn uring(host: &Host, made: io::Result<()>) -> Finding {
    let disabled = host.number("proc/sys/kernel/io_uring_disabled");
    let value = json!({"works": made.is_ok(), "io_uring_disabled": disabled});
    let cost = "disks use threads: more system calls and switches for each request";
    match made {
        Ok(()) => Finding::ok("io_uring", value, "works"),
        Err(e) if disabled.is_some_and(|n| n > 0) => {
            let said = format!("turned off by kernel.io_uring_disabled: {}", reason(&e));
            Finding::ok("io_uring", value, said).lacking(cost, "sysctl kernel.io_uring_disabled=0")
        }
        Err(e) => Finding::ok("io_uring", value, format!("refused: {}", reason(&e)))
            .lacking(cost, "Linux 5.10 or newer; in a container, a seccomp profile that allows io_uring_setup"),
    }
}

fn iommu(host: &Host) -> Finding {
    let groups = host.list("sys/kernel/iommu_groups").len();
    let (vfio, iommufd) = (host.opens("dev/vfio/vfio").is_ok(), host.opens("dev/iommu").is_ok());
    let does = |opens| if opens { "opens" } else { "doesn't open" };
    let found = Finding::ok(
        "iommu",
        json!({"groups": groups, "vfio": vfio, "iommufd": iommufd}),
        format!("{groups} groups, /dev/vfio/vfio {}, /dev/iommu {}", does(vfio), does(iommufd)),
    );
    let cost = "no PCI devices can be passed through to guests";
    match (groups, vfio || iommufd) {
        (0, _) => found
            .lacking(cost, "turn on VT-d or AMD-Vi in the firmware and boot with intel_iommu=on (AMD: on by itself)"),
        (_, false) => found.lacking(cost, "modprobe vfio-pci, and bind a device to it"),
        _ => found,
    }
}

fn tun(host: &Host) -> Finding {
    /// `CAP_NET_ADMIN`'s bit.
    const NET_ADMIN: u32 = 12;
    let opened = host.opens("dev/net/tun");
    let admin = host.may(NET_ADMIN);
    let value = json!({"opens": opened.is_ok(), "can_make_taps": opened.is_ok() && admin});
    match opened {
        Ok(()) if admin => Finding::ok("net.tun", value, "/dev/net/tun opens, taps can be made"),
        Ok(()) => Finding::ok("net.tun", value, "/dev/net/tun opens, but taps can't be made")
            .lacking("guests only get taps that were made for them", "ip tuntap add NAME mode tap user YOU, as root"),
        Err(e) => Finding::ok("net.tun", value, format!("/dev/net/tun: {}", reason(&e)))
            .lacking("no network for guests over taps", "modprobe tun; in a container pass --device /dev/net/tun"),
    }
}

fn vhost(host: &Host, key: &'static str) -> Finding {
    let (node, cost, get) = match key {
        "vhost.net" => {
            ("dev/vhost-net", "guest networks go through the monitor instead of the kernel", "modprobe vhost_net")
        }
        _ => ("dev/vhost-vsock", "guest sockets go through the monitor instead of the kernel", "modprobe vhost_vsock"),
    };
    match host.opens(node) {
        Ok(()) => Finding::ok(key, true, format!("/{node} opens")),
        Err(e) => Finding::ok(key, false, format!("/{node}: {}", reason(&e))).lacking(cost, get),
    }
}

#[cfg(test)]
pub(super) fn uring_of(host: &Host, made: io::Result<()>) -> Finding {
    uring(host, made)
}
