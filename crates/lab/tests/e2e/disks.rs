// SPDX-License-Identifier: Apache-2.0
//! Disks in a real guest: what is written stays written, what is not to be written is not, and a full host is an I/O error.

use crate::lab::script;

#[test]
#[ignore = "needs the lab: make e2e"]
fn what_the_guest_writes_is_there_afterwards_and_the_file_system_is_clean() {
    let printed = script(
        r#"
for mode in writeback,aio=io_uring writeback,aio=threads none; do
    echo "== $mode"
    guest "$ROOT;dd if=/dev/urandom of=/mnt/data bs=64k count=64 2>/dev/null;sync;sha256sum /mnt/data;umount /mnt/*;umount /mnt;$OFF" \
        --disk "path=/lab/root.ext4,cache=$mode"
    debugfs -R "dump /data /lab/data" /lab/root.ext4 2>/dev/null
    echo "here $(sha256sum </lab/data)"
    e2fsck -fn /lab/root.ext4 >/lab/fsck 2>&1
    echo "fsck $?"
done
"#,
        &[],
    );
    for mode in ["writeback,aio=io_uring", "writeback,aio=threads", "none"] {
        let part = printed.part(mode);
        let sum =
            |end: &str| part.lines().find_map(|line| line.strip_suffix(end)).map(|sum| sum.trim_start_matches("here "));
        let inside = sum("  /mnt/data").unwrap_or_else(|| panic!("no sum: {printed:#?}"));
        assert_eq!(Some(inside), sum("  -"), "{part}");
        assert!(part.contains("status 0") && part.contains("fsck 0"), "{part}");
    }
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_read_only_disk_is_read_only_and_unchanged() {
    let printed = script(
        r#"
truncate -s 64M /lab/second.raw
mkfs.ext4 -q /lab/second.raw
before=$(sha256sum </lab/second.raw)
guest "cat /sys/block/vda/ro;echo x >/dev/vda || echo refused;blockdev --setrw /dev/vda;echo x >/dev/vda || echo refused;$OFF" \
    --disk path=/lab/second.raw,readonly=on
[ "$before" = "$(sha256sum </lab/second.raw)" ] && echo unchanged
"#,
        &[],
    );
    printed.shows("1\n").shows("refused").shows("status 0").shows("unchanged");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_full_host_disk_is_an_io_error_for_the_guest_and_no_end() {
    let printed = script(
        r#"
mkdir -p /lab/small
mount -t tmpfs -o size=24m small /lab/small
truncate -s 256M /lab/small/disk.raw
guest "dd if=/dev/zero of=/dev/vda bs=1M count=100 oflag=direct && echo all written;dd if=/dev/vda of=/dev/null bs=1M count=8 && echo still reads;$OFF" \
    --disk path=/lab/small/disk.raw
"#,
        &[],
    );
    printed.shows("I/O error").shows("still reads").shows("status 0");
    assert!(!printed.stdout.contains("all written"), "{printed:#?}");
    let said = "disk /lab/small/disk.raw: the host failed a request, No space left on device; make room";
    assert!(printed.stdout.contains(said) || printed.stderr.contains(said), "the user hears of it: {printed:#?}");
}

/// One boot for what a guest sees of a disk's device: queues, names and sizes, a resize while it runs, rate limits.
#[test]
#[ignore = "needs the lab: make e2e"]
fn the_guest_sees_queues_sizes_a_resize_and_rate_limits() {
    let printed = script(
        r#"
truncate -s 64M /lab/plain.raw /lab/slow.raw
touch /lab/out
(
    until grep -q 'size 131072' /lab/out; do sleep 0.2; done
    tare ctl --api /lab/api resize-disk --disk disk0 --size 96M
    echo "ctl $?"
    tare ctl --api /lab/api resize-disk --disk disk0 --size 32M 2>&1
    echo "ctl $?"
    tare ctl --api /lab/api info
) >/lab/asked &
LOOK='cd /sys/block;for d in vda vdb;do echo $d queues $(ls $d/mq);for f in serial cache_type queue/logical_block_size'
LOOK="$LOOK"' queue/physical_block_size queue/minimum_io_size queue/discard_max_bytes;do echo $d $f $(cat $d/$f);done;done;'
WCE='echo write through >vda/cache_type;cat vda/cache_type;echo write back >vda/cache_type;'
GROW='echo size $(cat vda/size);until [ $(cat vda/size) != 131072 ];do sleep 0.1;done;echo size $(cat vda/size);dmesg | grep size:;'
GROW="$GROW"'dd if=/dev/zero of=/dev/vda bs=1M seek=95 count=1 oflag=direct && echo the new end is written;'
NOW='$(cut -d. -f1 /proc/uptime)'
RATE='for d in vda vdb;do a='$NOW';dd if=/dev/zero of=/dev/$d bs=64k count=80 oflag=direct;b='$NOW';echo $d took $((b-a)) s;done;'
guest "$LOOK$WCE$GROW$RATE$OFF" --cpus 2 --api /lab/api --ledger /lab/ledger \
    --disk path=/lab/plain.raw,serial=TARE-0001,logical-block-size=4K,physical-block-size=16K \
    --disk path=/lab/slow.raw,queues=1,bps=1M,bps-burst=128K >/lab/out
wait
cat /lab/out /lab/asked
[ -e /lab/api ] || echo the socket is gone
echo "plain is $(stat -c %s /lab/plain.raw)"
grep -A8 '"name": "disk1"' /lab/ledger
"#,
        &[],
    );
    printed.shows("vda queues 0 1\n").shows("vdb queues 0\n").shows("vda serial TARE-0001\n");
    printed.shows("vda queue/logical_block_size 4096\n").shows("vda queue/physical_block_size 16384\n");
    printed.shows("vda queue/minimum_io_size 16384\n").shows("vda queue/discard_max_bytes 134217728\n");
    printed.shows("vda cache_type write back\n").shows("vdb queue/logical_block_size 512\n").shows("write through\n");
    printed.shows("size 131072\n").shows("size 196608\n").shows("ctl 0\n").shows("ctl 2\n");
    printed.shows("new size").shows("the new end is written").shows("plain is 100663296\n");
    printed.shows("a disk in use does not shrink").shows("\"size\": 100663296").shows("the socket is gone");
    printed.shows("status 0");
    // 5 MiB at 1 MiB a second less the burst, on the guest's clock, which counts instructions and the disk's waits.
    let took = |disk: &str| -> u64 {
        let line = printed.stdout.lines().find_map(|line| line.strip_prefix(&format!("{disk} took ")));
        line.and_then(|rest| rest.trim_end_matches(" s").parse().ok()).unwrap_or_else(|| panic!("{printed:#?}"))
    };
    assert!((4..=6).contains(&took("vdb")) && took("vda") <= 1, "{printed:#?}");
    let throttled = printed.stdout.lines().find_map(|line| line.trim().strip_prefix("\"throttled\": "));
    assert!(throttled.is_some_and(|count| count != "0,"), "{printed:#?}");
}
