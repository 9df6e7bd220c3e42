// SPDX-License-Identifier: Apache-2.0
//! Any bytes as the parts of a qcow2 image on paper: header, table entries, refcounts, compressed clusters. What is accepted
//! must survive being written and read again.
#![no_main]

use block::qcow2::format::compress::Decompressor;
use block::qcow2::format::entry::Layout;
use block::qcow2::format::header::{Compression, Header};
use block::qcow2::format::refcount::{Width, table_entry};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(header) = Header::parse(data) {
        let _ = header.check_layout(data.len() as u64);
        if let Ok(cluster) = header.to_cluster() {
            assert_eq!(cluster.len() as u64, header.cluster_size());
            if let Err(error) = Header::parse(&cluster) {
                panic!("{error}: {header:?}");
            }
        }
    }
    let Some((head, rest)) = data.split_first_chunk::<26>() else { return };
    let long = |at: usize| head[at..at + 8].iter().fold(0_u64, |v, b| v << 8 | u64::from(*b));
    let bits = 9 + u32::from(head[24]) % 13;
    let layout = Layout {
        cluster_bits: bits,
        extended: head[25] & 1 != 0 && bits >= 14,
        data_file: head[25] & 2 != 0,
        zero_flag: head[25] & 4 != 0,
    };
    let _ = layout.l1_entry(long(0));
    if let Ok(mapping) = layout.classify(long(0), long(8), long(16)) {
        if let Some((word, bitmap)) = layout.encode(&mapping) {
            assert_eq!(layout.classify(word, bitmap, long(16)).as_ref(), Ok(&mapping));
        }
    }
    let _ = table_entry(long(0), bits);
    if let Some(width) = Width::from_bits(1 << (head[25] % 8)) {
        let mut block = rest.to_vec();
        let entries = block.len() * 8 / width.bits() as usize;
        if entries > 0 {
            let at = usize::from(head[24]) % entries;
            if width.set(&mut block, at, long(8)) {
                assert_eq!(width.get(&block, at), long(8));
            }
            let _ = width.add(&mut block, at, long(16) as i64);
        }
    }
    // What it becomes is bounded by the cluster, whatever the stream claims.
    let kind = if head[25] & 8 == 0 { Compression::Zlib } else { Compression::Zstd };
    let mut cluster = vec![0; 1 << bits.min(16)];
    if let Ok(mut decompressor) = Decompressor::new(kind) {
        let _ = decompressor.run(rest, &mut cluster);
    }
});
