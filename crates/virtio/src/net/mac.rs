// SPDX-License-Identifier: Apache-2.0
//! Addresses for NICs whose user named none. Called when a device is made.

use std::sync::OnceLock;

use super::sys;

/// Locally administered, as QEMU's and libvirt's are.
const PREFIX: [u8; 3] = [0x52, 0x54, 0x00];

/// The address of NIC `number`: drawn once for this process, so that a guest that resets itself finds its NICs again.
pub fn drawn(number: usize) -> [u8; 6] {
    static BASE: OnceLock<u32> = OnceLock::new();
    let base = *BASE.get_or_init(|| sys::random().unwrap_or_else(std::process::id));
    let low = base.wrapping_add(u32::try_from(number).unwrap_or(u32::MAX)).to_be_bytes();
    [PREFIX[0], PREFIX[1], PREFIX[2], low[1], low[2], low[3]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_differ_and_stay() {
        let all: std::collections::HashSet<_> = (0..100).map(drawn).collect();
        assert_eq!(all.len(), 100);
        assert_eq!(drawn(7), drawn(7));
        assert!(all.iter().all(|mac| mac[0] & 3 == 2), "local and for one station");
    }
}
