// SPDX-License-Identifier: Apache-2.0
//! What a user sees of a start: `tare profile`, with and without the right to look at stacks; the bar while memory is made
//! ready; and a limit that the memory does not fit in.

use crate::lab::script;

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_start_is_shown_where_its_time_goes() {
    let printed = script(
        r#"
small_initrd
RUN=(run --kernel /lab/vmlinuz --initrd /lab/small.img --cmdline 'console=tty0 console=hvc0 quiet panic=-1 -- -c "poweroff -f"')
MEMORY="--memory 512M,pages=4K,prealloc=parallel,prealloc-threads=2"
frames() { grep -o '<title>[^<]*' $1 | sed 's/<title>//'; }
echo "== allowed"
tare profile --out /lab/graph.svg -- "${RUN[@]}" $MEMORY </dev/null 2>&1
echo "status $?"
frames /lab/graph.svg
echo "== denied"
chmod 666 /dev/kvm
echo 3 >/proc/sys/kernel/perf_event_paranoid
mkdir -m 777 /lab/nobody
setpriv --reuid 65534 --regid 65534 --clear-groups tare profile --out /lab/nobody/graph.svg -- "${RUN[@]}" $MEMORY </dev/null 2>&1
echo "status $?"
frames /lab/nobody/graph.svg
echo "== bar"
script -qec "tare ${RUN[*]@Q} --memory 1G,pages=4K,prealloc=touch" /dev/null </dev/null | tr '\r' '\n' | grep -o 'memory .*GiB/s'
echo "== limit"
mount -t cgroup2 c /sys/fs/cgroup 2>/dev/null
mkdir -p /sys/fs/cgroup/small
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
echo 200M >/sys/fs/cgroup/small/memory.max
(echo 0 >/sys/fs/cgroup/small/cgroup.procs; refused "${RUN[@]:1}" --memory 512M,prealloc=populate)
"#,
        &[],
    );
    let allowed = printed.part("allowed");
    assert!(allowed.contains("status 0"), "{allowed}");
    for frame in [
        "phases, by the clock (",
        "virtual machine and its memory (",
        "fault and zero (",
        "kernel, initrd and tables (",
        "CPU time, by thread (",
        "ready-0 (",
        "ready-1 (",
        "mem::prealloc::Prealloc::",
        "do_syscall_64 (",
        "clear_page_",
    ] {
        assert!(allowed.contains(frame), "{frame} is not in {allowed}");
    }
    let denied = printed.part("denied");
    assert!(
        denied.contains("tare: the profile has phases alone, Permission denied: perf_event_open; write 1 to"),
        "{denied}"
    );
    assert!(
        denied.contains("fault and zero (") && !denied.contains("CPU time") && denied.contains("status 0"),
        "{denied}"
    );
    let bar = printed.part("bar");
    assert!(bar.lines().any(|line| line.contains("[####") && line.contains(" of 1.0 GiB, ")), "{printed:#?}");
    let limit = printed.part("limit");
    assert!(limit.contains("512 MiB of guest memory can't be made ready, this cgroup may have"), "{limit}");
    assert!(limit.contains("raise /sys/fs/cgroup/small/memory.max") && limit.contains("status 2"), "{limit}");
}
