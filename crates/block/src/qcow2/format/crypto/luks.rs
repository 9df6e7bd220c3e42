// SPDX-License-Identifier: Apache-2.0
//! The LUKS1 header: a passphrase opens a key slot, whose material, merged from its stripes, is the key of the data. All sizes
//! and counts in it are checked before use, and there is a limit on the work that a header can ask for.

use sha1::Sha1;
use sha2::digest::{Digest, Output};
use sha2::{Sha256, Sha512};
use zeroize::Zeroizing;

use super::super::{FormatError, be16, be32};
use super::cipher::{Cipher, SECTOR};

/// Bytes that a new header takes with its eight slots, as QEMU lays it out.
pub const HEADER_BYTES: usize = (8 + SLOTS * 504) * SECTOR;
const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const SLOTS: usize = 8;
const SLOT_ACTIVE: u32 = 0x00ac_71f3;
const SLOT_INACTIVE: u32 = 0x0000_dead;
/// Stripes of a new slot.
const STRIPES: u32 = 4000;
/// The most stripes read, and the most rounds of key derivation done for one slot.
const MAX_STRIPES: u32 = 1 << 16;
const MAX_ROUNDS: u32 = 50_000_000;
const DIGEST_BYTES: usize = 20;

/// A hash that LUKS may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hash {
    Sha1,
    Sha256,
    Sha512,
}

impl Hash {
    fn named(name: &str) -> Result<Hash, FormatError> {
        match name {
            "sha1" => Ok(Hash::Sha1),
            "sha256" => Ok(Hash::Sha256),
            "sha512" => Ok(Hash::Sha512),
            _ => FormatError::unsupported(format!("LUKS with hash {name:?}; sha1, sha256 and sha512 are known")),
        }
    }

    fn derive(self, passphrase: &[u8], salt: &[u8], rounds: u32, out: &mut [u8]) {
        match self {
            Hash::Sha1 => pbkdf2::pbkdf2_hmac::<Sha1>(passphrase, salt, rounds, out),
            Hash::Sha256 => pbkdf2::pbkdf2_hmac::<Sha256>(passphrase, salt, rounds, out),
            Hash::Sha512 => pbkdf2::pbkdf2_hmac::<Sha512>(passphrase, salt, rounds, out),
        }
    }

    /// Spreads each bit of `block` over all of it (up to the hash's length).
    fn diffuse(self, block: &mut [u8]) {
        fn each<D: Digest>(block: &mut [u8]) {
            for (i, part) in block.chunks_mut(<D as Digest>::output_size()).enumerate() {
                let hash: Output<D> = D::new().chain_update((i as u32).to_be_bytes()).chain_update(&*part).finalize();
                part.copy_from_slice(&hash[..part.len()]);
            }
        }
        match self {
            Hash::Sha1 => each::<Sha1>(block),
            Hash::Sha256 => each::<Sha256>(block),
            Hash::Sha512 => each::<Sha512>(block),
        }
    }

    /// Joins `material`, stripes of `key_len` bytes, into the key they hide.
    fn merge(self, material: &[u8], key_len: usize) -> Zeroizing<Vec<u8>> {
        let mut key = Zeroizing::new(vec![0; key_len]);
        let stripes = material.len() / key_len;
        for (i, stripe) in material.chunks_exact(key_len).enumerate() {
            key.iter_mut().zip(stripe).for_each(|(k, s)| *k ^= s);
            if i + 1 < stripes {
                self.diffuse(&mut key);
            }
        }
        key
    }
}

struct Slot {
    rounds: u32,
    salt: [u8; 32],
    offset: usize,
    stripes: u32,
}

/// Opens the LUKS header in `area` (the bytes that the image's encryption extension names) with `passphrase`.
///
/// # Errors
/// A damaged header, ciphers that are not known, or a passphrase that opens no slot.
pub fn unlock(area: &[u8], passphrase: &[u8]) -> Result<Cipher, FormatError> {
    if area.get(..6) != Some(&MAGIC) || area.len() < 592 {
        return FormatError::corrupt("its LUKS header is not one");
    }
    if be16(area, 6) != 1 {
        return FormatError::unsupported(format!("LUKS version {}; version 1 is known", be16(area, 6)));
    }
    let (cipher, mode) = (text(area, 8), text(area, 40));
    let hash = Hash::named(text(area, 72))?;
    let key_len = be32(area, 108) as usize;
    let (digest, salt, rounds) = (&area[112..132], &area[132..164], be32(area, 164));
    // Says at once whether the cipher is known and the length fits.
    Cipher::new(cipher, mode, &vec![0; key_len.min(65)])?;
    if !(1..=MAX_ROUNDS).contains(&rounds) {
        return FormatError::unsupported(format!("a LUKS header with {rounds} rounds"));
    }
    for number in 0..SLOTS {
        let Some(slot) = slot(area, number, key_len)? else { continue };
        let mut slot_key = Zeroizing::new(vec![0; key_len]);
        hash.derive(passphrase, &slot.salt, slot.rounds, &mut slot_key);
        let len = key_len * slot.stripes as usize;
        // Whole sectors are encrypted; what is beyond the last stripe doesn't matter.
        let end = (slot.offset + len.next_multiple_of(SECTOR)).min(area.len());
        let mut material = Zeroizing::new(area[slot.offset..end].to_vec());
        material.resize(len.next_multiple_of(SECTOR), 0);
        Cipher::new(cipher, mode, &slot_key)?.decrypt(0, &mut material);
        let key = hash.merge(&material[..len], key_len);
        let mut check = [0; DIGEST_BYTES];
        hash.derive(&key, salt, rounds, &mut check);
        if check == digest {
            return Cipher::new(cipher, mode, &key);
        }
    }
    FormatError::unsupported("it is encrypted, and the passphrase opens none of its key slots")
}

/// The key slot of this number, if it is in use.
fn slot(area: &[u8], number: usize, key_len: usize) -> Result<Option<Slot>, FormatError> {
    let at = 208 + 48 * number;
    match be32(area, at) {
        SLOT_INACTIVE => return Ok(None),
        SLOT_ACTIVE => {}
        other => {
            return FormatError::corrupt(format!("LUKS key slot {number} is neither in use nor free ({other:#x})"));
        }
    }
    let mut salt = [0; 32];
    salt.copy_from_slice(&area[at + 8..at + 40]);
    let slot = Slot {
        rounds: be32(area, at + 4),
        salt,
        offset: be32(area, at + 40) as usize * SECTOR,
        stripes: be32(area, at + 44),
    };
    if !(1..=MAX_ROUNDS).contains(&slot.rounds) {
        return FormatError::unsupported(format!("LUKS key slot {number} with {} rounds", slot.rounds));
    }
    let inside =
        slot.offset.checked_add(key_len * slot.stripes.min(MAX_STRIPES) as usize).is_some_and(|e| e <= area.len());
    if !(1..=MAX_STRIPES).contains(&slot.stripes) || slot.offset < 592 || !inside {
        return FormatError::corrupt(format!("LUKS key slot {number} has its material outside the header"));
    }
    Ok(Some(slot))
}

fn text(area: &[u8], at: usize) -> &str {
    let bytes = &area[at..at + 32];
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(32);
    std::str::from_utf8(&bytes[..end]).unwrap_or("?")
}

/// What a new LUKS header is made of.
pub struct NewKey<'a> {
    /// Opens the first key slot.
    pub passphrase: &'a [u8],
    /// Rounds of key derivation for that slot; more make guessing dearer.
    pub rounds: u32,
    /// A source of bytes that nobody can guess.
    pub random: &'a mut dyn FnMut(&mut [u8]) -> std::io::Result<()>,
}

impl std::fmt::Debug for NewKey<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NewKey(..)")
    }
}

/// A new header of [`HEADER_BYTES`] for a new random key: aes-256 in xts-plain64 with sha256, as QEMU makes it.
///
/// # Errors
/// What the source of randomness says.
pub fn create(new: &mut NewKey<'_>) -> std::io::Result<Vec<u8>> {
    const KEY: usize = 64;
    let other = |e: FormatError| std::io::Error::other(e.to_string());
    let hash = Hash::Sha256;
    let mut area = vec![0; HEADER_BYTES];
    let mut random = |len: usize| {
        let mut bytes = Zeroizing::new(vec![0; len]);
        (new.random)(&mut bytes).map(|()| bytes)
    };
    let key = random(KEY)?;
    let (key_salt, slot_salt, uuid) = (random(32)?, random(32)?, random(16)?);
    let mut put = |at: usize, bytes: &[u8]| area[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC);
    put(6, &1u16.to_be_bytes());
    put(8, b"aes");
    put(40, b"xts-plain64");
    put(72, b"sha256");
    put(104, &((HEADER_BYTES / SECTOR) as u32).to_be_bytes());
    put(108, &(KEY as u32).to_be_bytes());
    let mut digest = [0; DIGEST_BYTES];
    let key_rounds = (new.rounds / 8).max(1000);
    hash.derive(&key, &key_salt, key_rounds, &mut digest);
    put(112, &digest);
    put(132, &key_salt);
    put(164, &key_rounds.to_be_bytes());
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    let uuid = format!("{}-{}-4{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..]);
    put(168, uuid.as_bytes());
    for number in 0..SLOTS {
        let at = 208 + 48 * number;
        put(at, &if number == 0 { SLOT_ACTIVE } else { SLOT_INACTIVE }.to_be_bytes());
        put(at + 40, &((8 + 504 * number) as u32).to_be_bytes());
        put(at + 44, &STRIPES.to_be_bytes());
    }
    put(212, &new.rounds.to_be_bytes());
    put(216, &slot_salt);
    let mut slot_key = Zeroizing::new(vec![0; KEY]);
    hash.derive(new.passphrase, &slot_salt, new.rounds, &mut slot_key);
    // All stripes but the last are noise; the last makes the whole merge into the key.
    let mut material = random(KEY * STRIPES as usize)?;
    let split = KEY * (STRIPES as usize - 1);
    material[split..].fill(0);
    let last = hash.merge(&material, KEY);
    for (to, (a, b)) in material[split..].iter_mut().zip(last.iter().zip(key.iter())) {
        *to = a ^ b;
    }
    Cipher::new("aes", "xts-plain64", &slot_key).map_err(other)?.encrypt(0, &mut material);
    put(8 * SECTOR, &material);
    Ok(area)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(rounds: u32) -> Vec<u8> {
        let mut seed = 1u64;
        let mut random = |bytes: &mut [u8]| {
            for b in bytes {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *b = (seed >> 56) as u8;
            }
            Ok(())
        };
        create(&mut NewKey { passphrase: b"sesame", rounds, random: &mut random }).unwrap()
    }

    #[test]
    fn the_passphrase_opens_and_others_do_not() {
        let area = made(1000);
        let cipher = unlock(&area, b"sesame").unwrap();
        let mut data = vec![7; 1024];
        cipher.encrypt(5, &mut data);
        unlock(&area, b"sesame").unwrap().decrypt(5, &mut data);
        assert_eq!(data, vec![7; 1024]);
        let said = unlock(&area, b"open").unwrap_err().to_string();
        assert!(said.contains("opens none of its key slots"), "{said}");
        assert!(unlock(&area, b"").is_err());
    }

    #[test]
    fn hostile_headers_are_refused() {
        let area = made(1000);
        let refused = |at: usize, bytes: &[u8]| {
            let mut bad = area.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            unlock(&bad, b"sesame").unwrap_err().to_string()
        };
        for (at, bytes, expect) in [
            (0, &b"X"[..], "is not one"),
            (7, &[2], "LUKS version 2"),
            (8, b"serpent", "cipher serpent"),
            (40, b"ecb", "cipher aes"),
            (72, b"md5\0", "hash \"md5\""),
            (108, &[0, 0, 0, 0], "key of 0 bits"),
            (108, &[255; 4], "cipher"),
            (164, &[255; 4], "rounds"),
            (164, &[0; 4], "0 rounds"),
            (208, &[1], "neither in use nor free"),
            (212, &[255; 4], "rounds"),
            (248, &[255; 4], "outside the header"),
            (248, &[0; 4], "outside the header"),
            (252, &[255; 4], "outside the header"),
            (252, &[0; 4], "outside the header"),
            (208, &[0, 0, 0xde, 0xad], "opens none"),
        ] {
            let said = refused(at, bytes);
            assert!(said.contains(expect), "{at}: {said}");
        }
        assert!(unlock(&area[..600], b"sesame").is_err());
        assert!(unlock(&area[..100], b"sesame").is_err());
    }
}
