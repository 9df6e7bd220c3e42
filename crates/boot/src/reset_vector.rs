// SPDX-License-Identifier: Apache-2.0
//! What a guest finds where a PC's BIOS would start over.
//!
//! Linux on a hardware-reduced machine without EFI does not use ACPI's reset register: it takes such a machine to need EFI's
//! reset, finds none, and jumps to the BIOS in real mode. So there has to be something that resets. Called by `load`.

use base::Gpa;
use mem::GuestRam;

use crate::{BootError, PmPorts};

/// F000:FFF0, where an x86 processor begins after a reset.
pub const RESET_VECTOR: Gpa = Gpa(0xf_fff0);

/// Puts the instructions that ask for a reset to the vector.
///
/// # Errors
/// [`BootError`] if there is no RAM below 1 MiB.
pub fn write(ram: &GuestRam, pm: &PmPorts) -> Result<(), BootError> {
    ram.write_bytes(RESET_VECTOR, &code(pm))?;
    Ok(())
}

/// 16-bit code: `mov dx, port; mov al, value; out dx, al; l: hlt; jmp l`.
fn code(pm: &PmPorts) -> [u8; 9] {
    let [low, high] = pm.reset.to_le_bytes();
    [0xba, low, high, 0xb0, pm.reset_value, 0xee, 0xf4, 0xeb, 0xfd]
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Gsi;

    #[test]
    fn the_vector_writes_the_reset_value_to_the_reset_port() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 2 << 20)]).unwrap();
        let pm = PmPorts { sleep_control: 0x600, sleep_status: 0x601, reset: 0x602, reset_value: 7, button: Gsi(5) };
        write(&ram, &pm).unwrap();
        let mut found = [0; 16];
        ram.read_bytes(Gpa(0xf_fff0), &mut found).unwrap();
        assert_eq!(found[..9], [0xba, 0x02, 0x06, 0xb0, 7, 0xee, 0xf4, 0xeb, 0xfd]);
        assert_eq!(found[9..], [0; 7], "nothing past the end of the first MiB");
    }
}
