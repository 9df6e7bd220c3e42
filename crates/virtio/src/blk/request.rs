// SPDX-License-Identifier: Apache-2.0
//! Reads a block request out of a descriptor chain (virtio 1.2, 5.2.6), wherever the driver cut it into descriptors
//! (2.7.4.1: framing says nothing about structure). Called by the worker for each chain; trusts nothing in it.
//!
//! Header and segment lists are copied out before they are looked at, so that the guest can't change them in between.

use base::{SECTOR_SIZE, Seg};
use block::Op;

use crate::fault::GuestFault;
use crate::queue::{Chain, window};

/// Bytes of the header: type, reserved, sector.
const HEADER: u32 = 16;
/// Bytes of the answer to `GET_ID`.
pub const ID_LEN: usize = 20;
/// Bytes of one range of a discard or write-zeroes.
const RANGE: u32 = 16;
/// Longest discard or write-zeroes range, in sectors; what the configuration space says. It bounds how long one takes.
pub const MAX_RANGE_SECTORS: u32 = 128 << 11;

/// Request types.
mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`.
const UNMAP: u32 = 1;

/// What the device is, as far as requests depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes of the disk; a multiple of `block`.
    pub size: u64,
    /// Bytes of a block, a power of two, at least 512: what the driver agreed to ask for whole ones of.
    pub block: u32,
    /// No writes.
    pub readonly: bool,
}

/// What a chain asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Bytes to move or a range to change; segments for the former are in the caller's list.
    Disk {
        /// What to do.
        op: Op,
        /// First byte.
        offset: u64,
        /// Length in bytes; 0 is legal and does nothing.
        len: u32,
    },
    /// The disk's serial number.
    GetId,
}

/// The place of a request's status byte: the last writable byte of its chain.
#[derive(Clone, Copy, Debug)]
pub struct StatusByte {
    at: Seg,
    /// Writable bytes before it.
    pub before: u32,
}

impl StatusByte {
    /// Finds it.
    ///
    /// # Errors
    /// [`GuestFault::BlkLayout`] if the chain has no writable byte.
    pub fn of(chain: &Chain) -> Result<Self, GuestFault> {
        let before = chain.writable_len().checked_sub(1).ok_or(GuestFault::BlkLayout)?;
        let last = chain.writable().last().filter(|s| s.len > 0).ok_or(GuestFault::BlkLayout)?;
        Ok(Self { at: Seg { ptr: last.ptr.wrapping_add(last.len - 1), len: 1 }, before })
    }

    /// Writes it. The memory must be mapped still: the worker that calls this holds the guest's memory.
    pub fn write(self, status: u8) {
        // SAFETY: `of` took the address from a segment of a popped chain, which lies in guest memory; the worker keeps that
        // mapped until every request it took is answered. A volatile byte can't tear, whatever the guest does meanwhile.
        unsafe { self.at.ptr.write_volatile(status) };
    }
}

impl Request {
    /// Reads the request in `chain`; puts the segments of the data that it moves into `data`, which the caller reuses.
    ///
    /// # Errors
    /// What is wrong with it; see [`GuestFault::answer`] for what the guest gets.
    pub fn parse(chain: &Chain, shape: Shape, data: &mut Vec<Seg>) -> Result<Self, GuestFault> {
        data.clear();
        let header = read_header(chain)?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([t0, t1, t2, t3]) {
            kind::IN => {
                // The caller found the status byte, so there is one to leave out.
                let len = chain.writable_len().saturating_sub(1);
                let offset = check_range(sector, u64::from(len), shape)?;
                window(chain.writable(), 0, len, data);
                Ok(Self::Disk { op: Op::Read, offset, len })
            }
            kind::OUT => {
                let len = chain.readable_len() - HEADER;
                if shape.readonly {
                    return Err(GuestFault::BlkReadOnly);
                }
                let offset = check_range(sector, u64::from(len), shape)?;
                window(chain.readable(), HEADER, len, data);
                Ok(Self::Disk { op: Op::Write, offset, len })
            }
            kind::FLUSH => Ok(Self::Disk { op: Op::Flush, offset: 0, len: 0 }),
            kind::GET_ID => Ok(Self::GetId),
            kind::DISCARD => parse_range(chain, shape, |flags| (flags == 0).then_some(Op::Discard)),
            kind::WRITE_ZEROES => parse_range(chain, shape, |flags| {
                (flags & !UNMAP == 0).then_some(Op::WriteZeroes { unmap: flags & UNMAP != 0 })
            }),
            _ => Err(GuestFault::BlkUnknown),
        }
    }
}

fn read_header(chain: &Chain) -> Result<[u8; HEADER as usize], GuestFault> {
    let mut header = [0; HEADER as usize];
    if chain.read_at(0, &mut header) == header.len() { Ok(header) } else { Err(GuestFault::BlkLayout) }
}

/// The byte offset of `sector`, if `len` bytes from there on are whole blocks of the disk.
fn check_range(sector: u64, len: u64, shape: Shape) -> Result<u64, GuestFault> {
    let offset = sector.checked_mul(SECTOR_SIZE).ok_or(GuestFault::BlkRange)?;
    let end = offset.checked_add(len).ok_or(GuestFault::BlkRange)?;
    let whole = (offset | len).is_multiple_of(shape.block.into());
    if !whole || end > shape.size { Err(GuestFault::BlkRange) } else { Ok(offset) }
}

/// Reads the one range of a discard or write-zeroes; the configuration space says that there may be only one.
fn parse_range(chain: &Chain, shape: Shape, op: impl FnOnce(u32) -> Option<Op>) -> Result<Request, GuestFault> {
    if shape.readonly {
        return Err(GuestFault::BlkReadOnly);
    }
    let mut range = [0; RANGE as usize];
    if chain.readable_len() != HEADER + RANGE || chain.read_at(HEADER, &mut range) != range.len() {
        return Err(GuestFault::BlkRange);
    }
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = range;
    let op = op(u32::from_le_bytes(flags)).ok_or(GuestFault::BlkFlags)?;
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    if sectors > MAX_RANGE_SECTORS {
        return Err(GuestFault::BlkRange);
    }
    // At most MAX_RANGE_SECTORS * 512 bytes, far below 2^32.
    let len = sectors * SECTOR_SIZE as u32;
    let offset = check_range(u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]), u64::from(len), shape)?;
    Ok(Request::Disk { op, offset, len })
}
