// SPDX-License-Identifier: Apache-2.0
//! Makes images whose clusters are compressed: filled once from front to back, the compressed streams end to end, tables as
//! they fill up, the header last. So a making that is interrupted leaves no image. Called by `convert -c`, on one thread;
//! compressing is its callers' work, on as many as they like.

use std::fs::File;
use std::io;
use std::path::Path;

use super::super::format::entry::{COPIED, Compressed, Layout, Mapping};
use super::super::format::header::Crypt;
use super::create::{CreateOptions, Preallocation, header, open_new};
use super::edit::Edit;
use super::image::take_lock;
use super::{Error, Image, Medium};

/// Streams are written in pieces of so many bytes.
const PIECE: usize = 1 << 20;

/// A new image that is being filled.
#[derive(Debug)]
pub struct Packer<'a> {
    edit: Edit<'a>,
    layout: Layout,
    /// Where the next stream begins, and where the clusters taken for streams end.
    at: u64,
    end: u64,
    /// Streams not yet written, and the place of the first.
    bytes: Vec<u8>,
    start: u64,
    /// The L2 table that is being filled, with its number.
    table: Option<(usize, Vec<u8>)>,
    /// The next guest cluster that may come.
    next: u64,
}

/// Makes an image at `path` and lets `fill` put its clusters in. Under `lazy` nothing is waited for to be durable. One that
/// is there already is overwritten, unless someone has it open.
///
/// # Errors
/// Options that exclude each other or compression, what the host says, or what `fill` says; there is no image then.
pub fn create_packed<E: From<Error>>(
    path: &Path,
    options: &CreateOptions,
    lazy: bool,
    fill: impl FnOnce(&mut Packer<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let header = header(path, options)?;
    if options.data_file.is_some() || options.encryption.is_some() || header.crypt != Crypt::None {
        return Err(Error::Refused(
            path.to_owned(),
            "can't hold compressed data with a data file or encryption".into(),
        )
        .into());
    }
    if options.preallocation != Preallocation::Off {
        return Err(Error::Refused(path.to_owned(), "can't be both compressed and preallocated".into()).into());
    }
    let file = open_new(path)?;
    take_lock(&file, path, true)?;
    Medium::set_size(&file, 0).map_err(Error::io(path, "empty it"))?;
    let medium: Box<dyn Medium> = if lazy { Box::new(Lazy(file)) } else { Box::new(file) };
    let l1 = vec![0; header.l1.count as usize];
    let mut image = Image { medium, path: path.to_owned(), header, snapshots: Ok(Vec::new()), l1, writable: true };
    let layout = image.layout();
    let edit = Edit::blank(&mut image);
    let mut packer =
        Packer { edit, layout, at: 0, end: 0, bytes: Vec::with_capacity(PIECE), start: 0, table: None, next: 0 };
    fill(&mut packer)?;
    packer.finish()?;
    let end = image.size()?.next_multiple_of(image.header.cluster_size());
    image.medium.set_size(end).map_err(Error::io(path, "size it"))?;
    Ok(image.sync()?)
}

impl Packer<'_> {
    /// Whether [`Packer::zero`] can be used: version 2 has no way to say it.
    pub fn has_zeroes(&self) -> bool {
        self.layout.zero_flag
    }

    /// Guest cluster `cluster` is what this stream holds: fewer bytes than a cluster. Clusters come in rising order.
    ///
    /// # Errors
    /// The file can't be written, or would be too long for what an entry can say.
    pub fn stream(&mut self, cluster: u64, stream: &[u8]) -> Result<(), Error> {
        let (bits, most) = (self.layout.cluster_bits, self.edit.header.width.max());
        if self.at < self.end && u64::from(self.edit.new.get(self.at >> bits)) >= most {
            self.at = self.end;
        }
        while self.end - self.at < stream.len() as u64 {
            let fresh = self.take()?;
            if fresh != self.end {
                self.at = fresh;
            }
            self.end = fresh + self.layout.cluster_size();
        }
        let what = Compressed { host: self.at, len: stream.len() as u64 };
        let Some(entry) = self.layout.encode(&Mapping::Compressed(what)) else {
            return Error::refused(self.edit.image.path(), "would be too long for compressed clusters of this size");
        };
        what.clusters(bits).for_each(|host| self.edit.new.add(host, 1));
        if self.at != self.start + self.bytes.len() as u64 || self.bytes.len() + stream.len() > PIECE {
            self.flush()?;
            self.start = self.at;
        }
        self.bytes.extend_from_slice(stream);
        self.at += stream.len() as u64;
        self.set(cluster, entry)
    }

    /// Guest cluster `cluster` holds these bytes, a whole cluster that compressing would not make smaller.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn plain(&mut self, cluster: u64, bytes: &[u8]) -> Result<(), Error> {
        let host = self.take()?;
        self.edit.new.add(host >> self.layout.cluster_bits, 1);
        self.edit.image.write(host, bytes)?;
        let entry = self.layout.encode(&Mapping::Data { host, copied: true }).unwrap_or_default();
        self.set(cluster, entry)
    }

    /// Guest cluster `cluster` reads as zeroes, whatever a backing file has there.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn zero(&mut self, cluster: u64) -> Result<(), Error> {
        let entry = self.layout.encode(&Mapping::Zero { host: None, copied: false }).unwrap_or_default();
        self.set(cluster, entry)
    }

    /// A cluster after all that were taken before; nothing counts it yet.
    fn take(&mut self) -> Result<u64, Error> {
        let offset = self.edit.allocate(1)?;
        self.edit.release(offset, 1);
        Ok(offset)
    }

    fn set(&mut self, cluster: u64, (raw, bitmap): (u64, u64)) -> Result<(), Error> {
        let within = cluster & ((1 << self.layout.l2_bits()) - 1);
        let index = (cluster >> self.layout.l2_bits()) as usize;
        if cluster < self.next || index >= self.edit.l1.len() {
            return Error::refused(self.edit.image.path(), format!("was given cluster {cluster} out of order"));
        }
        self.next = cluster + 1;
        if self.table.as_ref().is_none_or(|(present, _)| *present != index) {
            self.store_table()?;
            self.table = Some((index, vec![0; self.layout.cluster_size() as usize]));
        }
        let at = (within * self.layout.entry_size()) as usize;
        if let Some((_, table)) = &mut self.table {
            table[at..at + 8].copy_from_slice(&raw.to_be_bytes());
            if self.layout.extended {
                table[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
            }
        }
        Ok(())
    }

    fn store_table(&mut self) -> Result<(), Error> {
        if let Some((index, table)) = self.table.take() {
            self.edit.l1[index] = self.edit.store(&table)? | COPIED;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        if !self.bytes.is_empty() {
            self.edit.image.write(self.start, &self.bytes)?;
            self.bytes.clear();
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Error> {
        self.flush()?;
        self.store_table()?;
        self.edit.commit()
    }
}

/// A file whose durability is somebody else's affair.
struct Lazy(File);

impl Medium for Lazy {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        Medium::read_at(&self.0, buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        Medium::write_at(&self.0, buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Medium::size(&self.0)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        Medium::set_size(&self.0, size)
    }

    fn as_medium(&self) -> &dyn Medium {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::format::compress::Compressor;
    use super::super::super::format::header::Compression;
    use super::*;

    fn filled(options: &CreateOptions, clusters: &[(u64, Vec<u8>)]) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        let outcome: Result<(), Error> = create_packed(&path, options, true, |packer| {
            let mut compressor = Compressor::new(options.compression).unwrap();
            for (cluster, bytes) in clusters {
                let mut out = vec![0; bytes.len() - 1];
                match compressor.run(bytes, &mut out) {
                    _ if bytes.iter().all(|b| *b == 0) && packer.has_zeroes() => packer.zero(*cluster)?,
                    Some(len) => packer.stream(*cluster, &out[..len])?,
                    None => packer.plain(*cluster, bytes)?,
                }
            }
            Ok(())
        });
        outcome.unwrap();
        (dir, path)
    }

    /// Every third cluster noise, every fifth zeroes, the rest something that packs.
    fn content(cluster: u64, size: usize) -> Vec<u8> {
        let mut state = cluster + 1;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        match cluster {
            n if n % 5 == 4 => vec![0; size],
            n if n % 3 == 2 => (0..size).map(|_| noise()).collect(),
            n => (0..size).map(|i| if i % 7 == 0 { noise() } else { n as u8 }).collect(),
        }
    }

    #[test]
    fn what_was_packed_is_sound_and_reads_back() {
        for (bits, refcount_bits, extended_l2, version, compression) in [
            (16, 16, false, 3, Compression::Zlib),
            (9, 1, false, 3, Compression::Zstd),
            (12, 2, false, 3, Compression::Zlib),
            (14, 64, true, 3, Compression::Zstd),
            (16, 16, false, 2, Compression::Zlib),
        ] {
            let size = 1u64 << bits;
            let options = CreateOptions {
                size: 300 * size,
                cluster_size: size,
                refcount_bits,
                extended_l2,
                version,
                compression,
                ..CreateOptions::default()
            };
            // With gaps, some of whole tables.
            let clusters: Vec<(u64, Vec<u8>)> = (0..300)
                .filter(|n| n % 11 != 10 && *n > 20 && (*n < 50 || bits < 13))
                .map(|n| (n, content(n, size as usize)))
                .collect();
            let (_dir, path) = filled(&options, &clusters);
            let image = Image::open(&path, false).unwrap();
            let report = image.check().unwrap();
            assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{options:?} {report:?}");
            drop(image);
            let mut disk =
                crate::Disk::open(&crate::Options { readonly: true, ..crate::Options::qcow2(&path) }).unwrap();
            for (cluster, bytes) in &clusters {
                let mut back = vec![0xee; bytes.len()];
                read(&mut disk, cluster * size, &mut back);
                assert!(back == *bytes, "cluster {cluster} of {options:?}");
            }
        }
    }

    fn read(disk: &mut crate::Disk, offset: u64, bytes: &mut [u8]) {
        let wake = base::EventFd::new(0).unwrap();
        disk.attach(&wake).unwrap();
        let segs = [base::Seg { ptr: bytes.as_mut_ptr(), len: bytes.len() }];
        let len = bytes.len() as u64;
        disk.submit(&crate::Request { id: 0, op: crate::Op::Read, offset, len, segs: &segs });
        disk.detach();
        let mut done = Vec::new();
        disk.reap(&mut done);
        assert!(done.pop().unwrap().result.is_ok());
    }

    #[test]
    fn the_wrong_order_and_the_wrong_options_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        let outcome: Result<(), Error> = create_packed(&path, &options, true, |packer| {
            packer.stream(3, &[1; 100])?;
            packer.stream(3, &[1; 100])
        });
        assert!(outcome.unwrap_err().to_string().contains("out of order"));
        assert!(Image::open(&path, false).is_err(), "there is no image");
        let options = CreateOptions { preallocation: Preallocation::Full, ..options };
        let outcome: Result<(), Error> = create_packed(&path, &options, true, |_| Ok(()));
        assert!(outcome.unwrap_err().to_string().contains("preallocated"));
    }
}
