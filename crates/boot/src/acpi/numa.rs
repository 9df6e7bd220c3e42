// SPDX-License-Identifier: Apache-2.0
//! Which CPUs and which memory belong together: SRAT, with the room for memory that is plugged later, and SLIT (ACPI 6.5,
//! 5.2.16 and 5.2.17). Called by [`super::write`]; bytes only.

use acpi_tables::sdt::Sdt;
use base::Gpa;
use mem::GuestRam;

use super::{OEM, OEM_REVISION, OEM_TABLE};
use crate::platform::{Node, Platform};

const ENABLED: u32 = 1;
const HOT_PLUGGABLE: u32 = 1 << 1;
/// Distance of a node to itself, by definition.
const LOCAL: u8 = 10;
/// Distance of a node to another, where nothing is known.
const REMOTE: u8 = 20;

/// SRAT, if there is anything to say: nodes, or memory that may come later.
pub fn srat(ram: &GuestRam, platform: &Platform) -> Option<Sdt> {
    let one;
    let nodes = match (platform.nodes.is_empty(), platform.to_plug) {
        (true, None) => return None,
        (true, Some(_)) => {
            let memory = ram.regions().map(|(at, len, _)| (at, len)).collect();
            one = [Node { apic_ids: platform.apic_ids.clone(), memory }];
            &one[..]
        }
        (false, _) => &platform.nodes,
    };
    let mut table = Sdt::new(*b"SRAT", 48, 3, OEM, OEM_TABLE, OEM_REVISION);
    // Reserved, and 1 for the sake of old readers.
    table.write_u32(36, 1);
    for (node, number) in nodes.iter().zip(0u8..) {
        for id in &node.apic_ids {
            // Ids are below 255, nodes fewer: the higher bytes of both stay 0, as do flags past "enabled".
            table.append_slice(&[0, 16, number, *id as u8, ENABLED as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        for (at, len) in &node.memory {
            table.append_slice(&memory(number, *at, *len, ENABLED));
        }
    }
    if let Some((at, len)) = platform.to_plug {
        table.append_slice(&memory(0, at, len, ENABLED | HOT_PLUGGABLE));
    }
    Some(table)
}

fn memory(node: u8, at: Gpa, len: u64, flags: u32) -> [u8; 40] {
    let mut out = [0; 40];
    let mut put = |from: usize, bytes: &[u8]| out.iter_mut().skip(from).zip(bytes).for_each(|(to, byte)| *to = *byte);
    put(0, &[1, 40, node]);
    put(8, &at.0.to_le_bytes());
    put(16, &len.to_le_bytes());
    put(28, &flags.to_le_bytes());
    out
}

/// SLIT, if there are several nodes.
pub fn slit(platform: &Platform) -> Option<Sdt> {
    let count = platform.nodes.len();
    if count < 2 {
        return None;
    }
    let mut table = Sdt::new(*b"SLIT", 36, 1, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&(count as u64).to_le_bytes());
    for from in 0..count {
        let row: Vec<u8> = (0..count).map(|to| if from == to { LOCAL } else { REMOTE }).collect();
        table.append_slice(&row);
    }
    Some(table)
}
