// SPDX-License-Identifier: Apache-2.0
//! The host's faults: each hits one request and nothing else; requests that hang do not hold up others, and a reset waits
//! for them.

use block::{Disk, Fault, FaultPlan, MemImage, Op};
use virtio::device::VirtioDevice;

use crate::rig::*;

const DISK: usize = 64 << 10;

fn rig(plan: &FaultPlan) -> (Rig, MemImage) {
    let image = MemImage::new(vec![9; DISK]);
    (Rig::new(Disk::in_memory(&image, false).with_faults(plan), &spec::Disk::new("memory")), image)
}

#[test]
fn an_error_of_the_host_is_one_requests_error() {
    let plan = FaultPlan::new();
    let (mut rig, image) = rig(&plan);
    let faults = [
        (Op::Write, libc::ENOSPC, OUT, vec![1; 512], 0),
        (Op::Write, libc::EIO, OUT, vec![1; 512], 0),
        (Op::Read, libc::EIO, IN, vec![], 512),
        (Op::Flush, libc::EIO, FLUSH, vec![], 0),
        (Op::Discard, libc::ENOSPC, DISCARD, range(2, 1, 0), 0),
        (Op::WriteZeroes { unmap: false }, libc::EIO, WRITE_ZEROES, range(2, 1, 0), 0),
    ];
    for (op, errno, kind, out, room) in &faults {
        plan.add(Fault { times: 1, range: 1024..1536, ..Fault::every(*op, *errno) });
        // The same request elsewhere, in one batch with the one that fails, is well.
        let mut elsewhere = header(*kind, 8);
        elsewhere.extend(if matches!(*kind, DISCARD | WRITE_ZEROES) { range(8, 1, 0) } else { out.clone() });
        let mut here = header(*kind, 2);
        here.extend(out);
        let bad = [rig.readable(&here, &[]), rig.writable(room + 1, &[])].concat();
        let good = [rig.readable(&elsewhere, &[]), rig.writable(room + 1, &[])].concat();
        let (bad, good) = (rig.publish(&bad), rig.publish(&good));
        rig.kick();
        let reply = rig.wait(bad);
        assert_eq!((reply.status, reply.data), (IOERR, vec![0xcc; *room]), "{op:?}");
        assert_eq!(reply.written, u32::from(*room == 0), "{op:?}: a failed read claims no bytes");
        assert_eq!(rig.wait(good).status, OK, "{op:?}");
        assert_eq!(image.to_vec()[1024..1536], [9; 512], "{op:?}");
    }
    assert_eq!(rig.request(OUT, 2, &[4; 512], 0).status, OK, "and again when there is room");
    assert_eq!(image.to_vec()[1024..1536], [4; 512]);
    assert_eq!(rig.status.get(), 0);
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.errors, counts.faults), (faults.len() as u64, 0));
    assert_eq!((counts.writes, counts.write_bytes), (5, 3 * 512), "failed bytes are not counted");
}

fn held_read() -> Fault {
    Fault { op: Op::Read, range: 0..512, after: 0, times: 1, errno: None }
}

#[test]
fn a_hanging_request_holds_up_nobody() {
    let plan = FaultPlan::new();
    let (mut rig, _) = rig(&plan);
    plan.add(held_read());
    let bufs = [rig.readable(&header(IN, 0), &[]), rig.writable(513, &[])].concat();
    let hanging = rig.publish(&bufs);
    rig.kick();
    for i in 0..50 {
        assert_eq!(rig.request(OUT, 4 + i, &[i as u8; 512], 0).status, OK);
    }
    assert!(!rig.answered(hanging));
    plan.release();
    assert_eq!(rig.wait(hanging).data, [9; 512], "it is woken by the disk, without a kick");
}

#[test]
fn a_reset_leaves_nothing_in_flight() {
    let plan = FaultPlan::new();
    let (mut rig, _) = rig(&plan);
    plan.add(held_read());
    let bufs = [rig.readable(&header(IN, 0), &[]), rig.writable(513, &[])].concat();
    let hanging = rig.publish(&bufs);
    rig.kick();
    assert_eq!(rig.request(FLUSH, 0, &[], 0).status, OK);
    let interrupts = rig.irq.pulses();
    rig.device.reset();
    // The memory may be the guest's for something else now: the read has been there before the reset returned.
    assert_eq!(rig.wait(hanging).data, [9; 512]);
    assert_eq!(rig.irq.pulses(), interrupts, "nothing is signalled for it");
    rig.restart();
    assert_eq!(rig.request(IN, 0, &[], 512).data, [9; 512]);
}

#[test]
fn dropping_a_busy_device_ends_its_thread() {
    let plan = FaultPlan::new();
    let (mut rig, _) = rig(&plan);
    plan.add(held_read());
    let bufs = [rig.readable(&header(IN, 0), &[]), rig.writable(513, &[])].concat();
    rig.publish(&bufs);
    rig.kick();
    drop(rig);
}
