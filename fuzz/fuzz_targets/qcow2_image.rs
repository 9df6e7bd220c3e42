// SPDX-License-Identifier: Apache-2.0
//! Any bytes as a qcow2 image: opened, read, written, flushed and read again. Never a panic or a hang, and no more memory
//! than the cache's budget and 64 MiB. The image can name no file: the gate is shut.
#![no_main]

use block::{BackingGate, Disk, Options, Qcow2Options, RecordImage};
use testkit::qcow2::{Counting, Player, Rng, Step};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CACHE: u64 = 1 << 20;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mark = Counting::mark();
    use_image(data);
    let peak = Counting::peak_since(mark);
    assert!(peak < CACHE as usize + (64 << 20) + 4 * data.len(), "{peak} bytes of memory");
});

fn use_image(data: &[u8]) {
    let image = RecordImage::new(data.to_vec(), 1);
    // An image that says its clusters lie far out must not make this process store the distance.
    image.limit(4 << 20);
    let qcow2 = Qcow2Options { l2_cache: Some(CACHE), backing: BackingGate::None, ..Qcow2Options::default() };
    let readonly = data.first().is_some_and(|_| data.len() % 4 == 0);
    let options = Options { qcow2, readonly, ..Options::qcow2("/nowhere/image.qcow2") };
    let Ok(disk) = Disk::recorded_qcow2(&image, None, &options) else { return };
    let size = disk.size();
    let Ok(mut player) = Player::new(disk) else { return };
    let rng = &mut Rng::new(data.len() as u64);
    for id in 2..14 {
        let near = if rng.one_in(3) { size } else { size.min(256 << 10) };
        let len = (512 * (1 + rng.below(32))).min(near);
        let at = rng.below((near - len) / 512 + 1) * 512;
        let step = match rng.below(8) {
            0..4 => Step::Read { at, len },
            4..6 => Step::Write { at, len, id },
            6 => Step::Zero { at, len, unmap: true },
            _ => Step::Flush,
        };
        let _ = player.one(step);
    }
    let _ = player.disk.extents(0, size.min(1 << 20));
    drop(player.end());
}
