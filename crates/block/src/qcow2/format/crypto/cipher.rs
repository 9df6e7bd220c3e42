// SPDX-License-Identifier: Apache-2.0
//! Sectors under AES: XTS and CBC with the initialization vectors that LUKS1 names. XTS goes over a sector's blocks all at
//! once, which lets the processor's AES units overlap them.

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes192, Aes256, Block};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::super::FormatError;

/// Bytes that are encrypted as one.
pub const SECTOR: usize = 512;
/// Blocks in a sector.
const BLOCKS: usize = SECTOR / 16;

/// AES with a key of any length.
#[derive(Debug)]
enum Aes {
    Short(Aes128),
    Middle(Aes192),
    Long(Aes256),
}

impl Aes {
    fn new(key: &[u8]) -> Result<Aes, FormatError> {
        let aes = match key.len() {
            16 => Aes128::new_from_slice(key).ok().map(Aes::Short),
            24 => Aes192::new_from_slice(key).ok().map(Aes::Middle),
            32 => Aes256::new_from_slice(key).ok().map(Aes::Long),
            _ => None,
        };
        aes.ok_or_else(|| FormatError::Unsupported(format!("AES with a key of {} bits", key.len() * 8)))
    }

    fn encrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Short(aes) => aes.encrypt_blocks(blocks),
            Aes::Middle(aes) => aes.encrypt_blocks(blocks),
            Aes::Long(aes) => aes.encrypt_blocks(blocks),
        }
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Short(aes) => aes.decrypt_blocks(blocks),
            Aes::Middle(aes) => aes.decrypt_blocks(blocks),
            Aes::Long(aes) => aes.decrypt_blocks(blocks),
        }
    }
}

/// How a sector's number becomes its initialization vector.
#[derive(Debug)]
enum Iv {
    /// The low 32 bits.
    Plain,
    /// All 64 bits.
    Plain64,
    /// The number encrypted by a hash of the key.
    Essiv(Box<Aes>),
}

#[derive(Debug)]
enum Mode {
    Xts { data: Box<Aes>, tweak: Box<Aes> },
    Cbc(Box<Aes>),
}

/// Encrypts and decrypts the data of one image.
pub struct Cipher {
    mode: Mode,
    iv: Iv,
    guest: bool,
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher(..)")
    }
}

impl Cipher {
    /// As LUKS names it: `name` "aes" and `mode` one of "xts-plain64", "xts-plain", "cbc-plain64", "cbc-plain" and
    /// "cbc-essiv:sha256". Sectors are numbered by their place in the image file.
    ///
    /// # Errors
    /// Any other name, or a key of the wrong length.
    pub fn new(name: &str, mode: &str, key: &[u8]) -> Result<Cipher, FormatError> {
        let unknown = || FormatError::unsupported(format!("cipher {name}-{mode}; aes-xts and aes-cbc are known"));
        let Some((chain, iv)) = mode.split_once('-').filter(|_| name == "aes") else { return unknown() };
        let iv = match iv {
            "plain" => Iv::Plain,
            "plain64" => Iv::Plain64,
            "essiv:sha256" => {
                let hashed: Zeroizing<[u8; 32]> = Zeroizing::new(Sha256::digest(key).into());
                Iv::Essiv(Box::new(Aes::new(&hashed[..])?))
            }
            _ => return unknown(),
        };
        let mode = match chain {
            "xts" if key.len().is_multiple_of(2) => {
                let (data, tweak) = key.split_at(key.len() / 2);
                Mode::Xts { data: Box::new(Aes::new(data)?), tweak: Box::new(Aes::new(tweak)?) }
            }
            "cbc" => Mode::Cbc(Box::new(Aes::new(key)?)),
            _ => return unknown(),
        };
        Ok(Cipher { mode, iv, guest: false })
    }

    /// QEMU's first encryption: AES-128-CBC, the passphrase cut or zero-padded to 16 bytes as key, sectors numbered by their
    /// place on the guest's disk. Weak: for reading old images only.
    ///
    /// # Errors
    /// None in fact.
    pub fn old(passphrase: &[u8]) -> Result<Cipher, FormatError> {
        let mut key = Zeroizing::new([0; 16]);
        let len = passphrase.len().min(16);
        key[..len].copy_from_slice(&passphrase[..len]);
        Ok(Cipher { mode: Mode::Cbc(Box::new(Aes::new(&key[..])?)), iv: Iv::Plain64, guest: true })
    }

    /// The number of the first sector of data that is at `guest` on the disk and at `host` in the file (bytes, multiples of
    /// 512).
    #[inline]
    pub fn sector(&self, guest: u64, host: u64) -> u64 {
        (if self.guest { guest } else { host }) / SECTOR as u64
    }

    /// Encrypts `data`, whole sectors from number `first`, in place. A tail of less than a sector stays as it is.
    pub fn encrypt(&self, first: u64, data: &mut [u8]) {
        for (number, sector) in (first..).zip(data.chunks_exact_mut(SECTOR)) {
            match &self.mode {
                Mode::Xts { data: aes, tweak } => {
                    xts(self.iv(number), tweak, sector, |blocks| aes.encrypt(blocks));
                }
                Mode::Cbc(aes) => {
                    let mut last = self.iv(number);
                    for block in sector.chunks_exact_mut(16) {
                        let mut one = [Block::from((number_of(block) ^ last).to_le_bytes())];
                        aes.encrypt(&mut one);
                        block.copy_from_slice(&one[0]);
                        last = number_of(block);
                    }
                }
            }
        }
    }

    /// Decrypts `data`, whole sectors from number `first`, in place. A tail of less than a sector stays as it is.
    pub fn decrypt(&self, first: u64, data: &mut [u8]) {
        for (number, sector) in (first..).zip(data.chunks_exact_mut(SECTOR)) {
            match &self.mode {
                Mode::Xts { data: aes, tweak } => {
                    xts(self.iv(number), tweak, sector, |blocks| aes.decrypt(blocks));
                }
                Mode::Cbc(aes) => {
                    let mut blocks = [Block::default(); BLOCKS];
                    for (to, from) in blocks.iter_mut().zip(sector.chunks_exact(16)) {
                        to.copy_from_slice(from);
                    }
                    aes.decrypt(&mut blocks);
                    let mut last = self.iv(number);
                    for (block, plain) in sector.chunks_exact_mut(16).zip(&blocks) {
                        let next = number_of(block);
                        block.copy_from_slice(&(number_of(plain) ^ last).to_le_bytes());
                        last = next;
                    }
                }
            }
        }
    }

    fn iv(&self, sector: u64) -> u128 {
        match &self.iv {
            Iv::Plain => u128::from(sector as u32),
            Iv::Plain64 => u128::from(sector),
            Iv::Essiv(aes) => {
                let mut one = [Block::from(u128::from(sector).to_le_bytes())];
                aes.encrypt(&mut one);
                number_of(&one[0])
            }
        }
    }
}

/// Sixteen bytes as a number, first byte lowest.
fn number_of(block: &[u8]) -> u128 {
    block.first_chunk::<16>().map_or(0, |b| u128::from_le_bytes(*b))
}

/// One sector in XTS: each block masked before and after with a tweak that doubles from block to block.
fn xts(iv: u128, tweak: &Aes, sector: &mut [u8], aes: impl Fn(&mut [Block])) {
    let mut first = [Block::from(iv.to_le_bytes())];
    tweak.encrypt(&mut first);
    let mut masks = [0u128; BLOCKS];
    let mut mask = number_of(&first[0]);
    let mut blocks = [Block::default(); BLOCKS];
    for ((block, bytes), slot) in blocks.iter_mut().zip(sector.chunks_exact(16)).zip(&mut masks) {
        *slot = mask;
        *block = Block::from((number_of(bytes) ^ mask).to_le_bytes());
        mask = mask << 1 ^ if mask >> 127 == 1 { 0x87 } else { 0 };
    }
    aes(&mut blocks);
    for ((block, bytes), mask) in blocks.iter().zip(sector.chunks_exact_mut(16)).zip(&masks) {
        bytes.copy_from_slice(&(number_of(block) ^ mask).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn published_vectors() {
        // IEEE 1619, vectors 4 (AES-128, data unit 0) and 10 (AES-256, data unit 0xff): the first blocks of 512 bytes 00 01 …
        let mut data: Vec<u8> = (0..512).map(|i| i as u8).collect();
        let key = hex("2718281828459045235360287471352631415926535897932384626433832795");
        Cipher::new("aes", "xts-plain64", &key).unwrap().encrypt(0, &mut data);
        assert_eq!(data[..16], hex("27a7479befa1d476489f308cd4cfa6e2"));
        let mut data: Vec<u8> = (0..512).map(|i| i as u8).collect();
        let key = hex(
            "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462643383279502884197169399375105820974944592",
        );
        Cipher::new("aes", "xts-plain64", &key).unwrap().encrypt(0xff, &mut data);
        assert_eq!(data[..16], hex("1c3b3a102f770386e4836c99e370cf9b"));
        // SP 800-38A F.2.1, with the vector's IV folded into the first block.
        let mut data = hex("6bc1bee22e409f96e93d7e117393172a");
        for (i, b) in data.iter_mut().enumerate() {
            *b ^= i as u8;
        }
        data.resize(512, 0);
        Cipher::new("aes", "cbc-plain", &hex("2b7e151628aed2a6abf7158809cf4f3c")).unwrap().encrypt(0, &mut data);
        assert_eq!(data[..16], hex("7649abac8119b246cee98e9b12e9197d"));
    }

    #[test]
    fn what_is_encrypted_is_decrypted() {
        for mode in ["xts-plain64", "xts-plain", "cbc-plain64", "cbc-plain", "cbc-essiv:sha256"] {
            for len in [16, 24, 32] {
                let key: Vec<u8> = (0..if mode.starts_with("xts") { 2 * len } else { len }).collect();
                let cipher = Cipher::new("aes", mode, &key).unwrap();
                let plain: Vec<u8> = (0..2048).map(|i| (i * 7) as u8).collect();
                let mut data = plain.clone();
                cipher.encrypt(1 << 33, &mut data);
                assert!(data.chunks(16).zip(plain.chunks(16)).all(|(a, b)| a != b));
                let mut one = data[512..1024].to_vec();
                cipher.decrypt((1 << 33) + 1, &mut one);
                assert_eq!(one, plain[512..1024], "{mode}: a sector by itself");
                cipher.decrypt(1 << 33, &mut data);
                assert!(data == plain, "{mode}");
            }
        }
        assert_eq!(Cipher::old(b"x").unwrap().sector(1024, 65_536), 2);
        assert_eq!(Cipher::new("aes", "xts-plain64", &[0; 64]).unwrap().sector(1024, 65_536), 128);
        for (name, mode, len) in [
            ("serpent", "xts-plain64", 64),
            ("aes", "ecb", 32),
            ("aes", "xts-plain64", 33),
            ("aes", "xts-benbi", 32),
            ("aes", "cbc-plain64", 17),
        ] {
            assert!(Cipher::new(name, mode, &vec![0; len]).is_err());
        }
    }
}
