// SPDX-License-Identifier: Apache-2.0
//! How runs end: each way has its own exit status, as `tare run --help` says.

use crate::lab::script;

#[test]
#[ignore = "needs the lab: make e2e"]
fn each_ending_has_its_status() {
    let printed = script(
        r#"
echo "== panic"
PANIC=0 guest "echo c >/proc/sysrq-trigger"
echo "== reset loop"
guest "echo b >/proc/sysrq-trigger"
echo "== reset, exit"
guest "echo b >/proc/sysrq-trigger" --on-reset exit
echo "== triple fault"
MORE=reboot=t guest "echo b >/proc/sysrq-trigger"
"#,
        &[],
    );
    for (name, status) in [("panic", 5), ("reset loop", 4), ("reset, exit", 0)] {
        let part = printed.part(name);
        assert!(part.contains(&format!("status {status}\n")), "{name}: {part}\n{}", printed.stderr);
    }
    // A guest that asks for its reset with a triple fault is a guest that resets, unless the host says otherwise.
    let part = printed.part("triple fault");
    assert!(part.contains("status 4") || part.contains("status 7"), "{part}");
    assert!(!printed.stderr.contains("panicked at"), "{}", printed.stderr);
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_first_sigterm_presses_the_power_button_and_a_second_one_ends_the_run() {
    let printed = script(
        r#"
# start NAME COMMAND LINE: the guest in the background, until it has said that it is up.
start() {
    tare run --kernel /lab/vmlinuz --initrd "${INITRD:-/lab/initrd.img}" --disk path=/lab/root.ext4 --memory 512M --cmdline "$2" </dev/null >/lab/$1.out 2>&1 &
    tare=$!
    for i in $(seq 600); do grep -q UP /lab/$1.out && break; sleep 0.2; done
    echo "== $1"
    grep -c UP /lab/$1.out
}
start asked 'console=tty0 console=hvc0 root=/dev/vda rw systemd.unit=multi-user.target systemd.wants=dbus.socket systemd.run="/bin/sh -c '"'"'systemctl start systemd-logind; echo UP >/dev/console; sleep 1000'"'"'"'
sleep 2
kill -TERM $tare
wait $tare
echo "status $?"
INITRD=/lab/small.img
small_initrd
start deaf 'console=tty0 console=hvc0 quiet -- -c "echo UP;sleep 1000"'
kill -TERM $tare
sleep 1
kill -TERM $tare
wait $tare
echo "status $?"
pgrep -x tare || echo "none left"
"#,
        &[],
    );
    assert!(printed.part("asked").contains("status 0"), "{printed:#?}");
    assert!(printed.part("deaf").contains("status 6"), "{printed:#?}");
    printed.shows("none left");
}
