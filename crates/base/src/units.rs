// SPDX-License-Identifier: Apache-2.0
//! Units as types, so that a guest address can't reach a call that wants a host one.
//!
//! Used by every room. All arithmetic that may meet guest-supplied numbers is checked.

use std::fmt;

/// Bytes in a virtio and ATA sector (virtio 1.2, 5.2.4: capacity is in units of 512 bytes).
pub const SECTOR_SIZE: u64 = 512;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty), $fmt:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl $name {
            /// This plus `n`, or `None` past the end of the type.
            #[must_use]
            pub const fn checked_add(self, n: $inner) -> Option<Self> {
                match self.0.checked_add(n) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $fmt, self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $fmt, self.0)
            }
        }
    };
}

unit!(
    /// A guest physical address in bytes.
    Gpa(u64), "gpa {:#x}"
);
unit!(
    /// A host virtual address in bytes, inside this process.
    Hva(u64), "hva {:#x}"
);
unit!(
    /// A global system interrupt: an input line of the guest's interrupt controllers, or a routed MSI.
    Gsi(u32), "gsi {}"
);
unit!(
    /// A 512-byte sector number of a disk.
    Sector(u64), "sector {}"
);

impl Sector {
    /// The byte offset of this sector, or `None` past 2^64.
    #[must_use]
    pub const fn to_bytes(self) -> Option<u64> {
        self.0.checked_mul(SECTOR_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sector_to_bytes_refuses_to_wrap() {
        assert_eq!(Sector(8).to_bytes(), Some(4096));
        assert_eq!(Sector(u64::MAX / 512 + 1).to_bytes(), None);
        assert_eq!(Gpa(u64::MAX).checked_add(1), None);
    }
}
