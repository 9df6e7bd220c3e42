// SPDX-License-Identifier: Apache-2.0
//! Scripts in fresh copies of the lab machine. Used by every test here; tests share nothing but the lab's cache.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What every script may use.
const PRELUDE: &str = r#"
set -u
cd /lab
# The guest's own way to the end: everything written, then power-off through ACPI.
OFF='sync;echo o >/proc/sysrq-trigger;sleep 60'
# Mounts the stock root disk inside a guest (ROOT_RO: a read-only one).
ROOT="mount -t ext4 /dev/vda /mnt;for d in proc sys dev;do mount --bind /\$d /mnt/\$d;done"
ROOT_RO="mount -t ext4 -o ro /dev/vda /mnt;for d in proc sys dev;do mount --bind /\$d /mnt/\$d;done"

# pack_initrd FILE MODULE...: a small initrd: busybox, the modules in this order, and an init that loads them and then is a
# shell with the arguments that the kernel's command line has after --.
pack_initrd() {
    file=$1
    shift
    rm -rf /lab/initrd
    mkdir -p /lab/initrd/bin /lab/initrd/modules /lab/initrd/mnt /lab/initrd/proc /lab/initrd/sys /lab/initrd/dev
    cp "$(command -v busybox)" /lab/initrd/bin/busybox
    number=100
    for module in "$@"; do
        number=$((number + 1))
        cp "$module" /lab/initrd/modules/$number.ko
    done
    cat >/lab/initrd/init <<'END'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc
mount -t sysfs s /sys
mount -t devtmpfs d /dev
for module in /modules/*.ko; do insmod $module; done
exec </dev/console >/dev/console 2>&1
exec sh "$@"
END
    chmod +x /lab/initrd/init
    (cd /lab/initrd && find . | busybox cpio -o -H newc 2>/dev/null) >"$file"
}

# small_initrd: the stock kernel's own modules in /lab/small.img, without the seconds that a full initrd takes to unpack.
small_initrd() {
    mkdir -p /lab/stock
    mount -o loop,ro /lab/root.ext4 /lab/stock
    # shellcheck disable=SC2046
    pack_initrd /lab/small.img $(modprobe -d /lab/stock -S "$(ls /lab/stock/lib/modules)" --show-depends -a \
        virtio_pci virtio_blk virtio_console virtio_rng pvpanic-mmio | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
    umount /lab/stock
}

# guest SCRIPT FLAGS...: the stock kernel under tare with a small initrd, and SCRIPT (no double quotes in it) as its first program.
# Says how tare ended; after LIMIT seconds it is made to.
guest() {
    script=$1
    shift
    [ -e /lab/small.img ] || small_initrd
    timeout -k 5 "${LIMIT:-150}" tare run --kernel /lab/vmlinuz --initrd /lab/small.img --memory "${MEMORY:-256M}" \
        --cmdline "console=tty0 console=hvc0 quiet panic=${PANIC:--1} ${MORE:-} -- -c \"$script\"" "$@" </dev/null
    echo "status $?"
}

# passthrough_devices: waits until the disk and the card to hand on are plugged in; NVME and CARD are their addresses.
passthrough_devices() {
    NVME=0000:01:00.0
    CARD=0000:02:00.0
    until [ -b /dev/nvme0n1 ] && [ -e /sys/bus/pci/devices/$CARD ] && [ -e /sys/bus/pci/devices/0000:03:00.0 ]; do sleep 0.2; done
}

# kept_card ADDRESS: the card at the other end of that wire, which stays here, is up with this address.
kept_card() {
    if ! [ -e /sys/bus/pci/drivers/virtio-pci ]; then
        mkdir -p /lab/stock
        mount -o loop,ro /lab/root.ext4 /lab/stock
        modprobe -d /lab/stock virtio_pci
        umount /lab/stock
    fi
    until kept=$(ls /sys/bus/pci/devices/0000:03:00.0/virtio*/net 2>/dev/null) && [ -n "$kept" ]; do sleep 0.2; done
    ip addr add "$1" dev "$kept"
    ip link set "$kept" up
}

# For in_stock_root, in a guest that was given that disk and that card: fio verifies what it wrote; iperf3 fills the wire to the
# kept card at 10.9.0.1.
VERIFY_DISK='
fio --name=v --filename=/dev/nvme0n1 --rw=randwrite --bs=4k --size=8M --ioengine=libaio --direct=1 --iodepth=16 \
    --verify=crc32c --do_verify=1 --verify_fatal=1 >/tmp/fio
echo "fio $?"
'
FILL_WIRE='
modprobe vmxnet3
card=$(ls /sys/bus/pci/drivers/vmxnet3/0000:*/net)
ip addr add 10.9.0.2/24 dev $card
ip link set $card up
for try in 1 2 3 4 5 6 7 8; do ping -c 1 -W 1 10.9.0.1 >/dev/null 2>&1 && break; done
iperf3 -c 10.9.0.1 -n 4M | grep -E "sender|receiver"
echo "iperf3 ${PIPESTATUS[0]}"
'

# in_stock_root NAME TEXT: a script in the root of the guests' disk.
in_stock_root() {
    mkdir -p /lab/stock
    mount -o loop /lab/root.ext4 /lab/stock
    printf '%s\n' "$2" >/lab/stock/$1
    umount /lab/stock
}

# refused FLAGS...: a run that cannot start. Says how it ended; its complaint goes to standard output.
refused() {
    timeout 60 tare run "$@" </dev/null 2>&1
    echo "status $?"
}
"#;

/// `tare` for machines that name no interrupt controller, with that of the option instead of the usual one.
const WITH_IRQCHIP: &str = r#"#!/bin/bash
[ "${1:-}" = run ] || exec -a tare /lab/programs/tare "$@"
shift
case " $* " in *" --irqchip "*) exec -a tare /lab/programs/tare run "$@" ;; esac
exec -a tare /lab/programs/tare run --irqchip IRQCHIP "$@"
"#;

/// The interrupt controller that all machines have unless their test names one: `$TARE_E2E_IRQCHIP`, if set.
pub fn irqchip() -> Option<String> {
    std::env::var("TARE_E2E_IRQCHIP").ok().filter(|word| !word.is_empty())
}

/// What a script printed.
#[derive(Debug)]
pub struct Printed {
    /// Its standard output, carriage returns left out.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Printed {
    /// The part of the output between the line `== NAME` and the next such line, its last line feed with it.
    pub fn part(&self, name: &str) -> &str {
        let head = format!("== {name}\n");
        let Some((_, rest)) = self.stdout.split_once(&head) else { panic!("no part '{name}' in {self:#?}") };
        let end = if rest.starts_with("== ") { Some(0) } else { rest.find("\n== ").map(|at| at + 1) };
        &rest[..end.unwrap_or(rest.len())]
    }

    /// Fails the test unless the whole output has `wanted` in it.
    #[track_caller]
    pub fn shows(&self, wanted: &str) -> &Self {
        assert!(self.stdout.contains(wanted), "'{wanted}' is not in {self:#?}");
        self
    }
}

/// The folder of the programs under test: that of this build, or `$TARE_PROGRAMS`.
pub fn programs() -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_tare-lab")).parent().map(Path::to_owned);
    std::env::var_os("TARE_PROGRAMS").map(PathBuf::from).or(built).unwrap_or_default()
}

/// `tare-lab` itself, not yet started.
pub fn tare_lab(args: &[&str]) -> Command {
    let mut command = Command::new(programs().join("tare-lab"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Which lab machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The one whose clock counts instructions.
    Counted,
    /// The one with an IOMMU and devices to hand on.
    Passthrough,
    /// The same with a kernel that has iommufd.
    Iommufd,
}

/// The folder of the lab machine's kernel with iommufd, if it was built.
pub fn iommufd_kernel() -> Option<String> {
    let output = tare_lab(&["host", "info"]).output().ok()?;
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    Some(info["kernels"]["iommufd"].as_str()?.to_owned())
}

/// Runs `script` with bash in a fresh copy of the lab machine that has `tare` and the named files.
#[track_caller]
pub fn script(script: &str, files: &[(PathBuf, &str)]) -> Printed {
    script_in(Place::Counted, script, files)
}

/// As [`script`], in a machine of the caller's choice.
#[track_caller]
pub fn script_in(place: Place, script: &str, files: &[(PathBuf, &str)]) -> Printed {
    let tare = programs().join("tare");
    assert!(tare.is_file(), "{} is not built: `make e2e` does that", tare.display());
    let Ok(scratch) = tempfile::tempdir() else { panic!("no room for a temporary folder") };
    let text = scratch.path().join("script");
    if let Err(error) = std::fs::write(&text, format!("{PRELUDE}\n{script}\necho \"== over\"\n")) {
        panic!("{}: {error}", text.display());
    }
    let mode = if place == Place::Counted { "--counted" } else { "--passthrough" };
    let mut command = tare_lab(&["host", "once", mode, "--clock-limit", "1800", "--real-limit", "1800"]);
    if place == Place::Iommufd {
        command.arg("--kernel").args(iommufd_kernel());
    }
    if let Some(irqchip) = irqchip() {
        let with = scratch.path().join("tare");
        let written = std::fs::write(&with, WITH_IRQCHIP.replace("IRQCHIP", &irqchip))
            .and_then(|()| std::fs::set_permissions(&with, std::fs::Permissions::from_mode(0o755)));
        if let Err(error) = written {
            panic!("{}: {error}", with.display());
        }
        command.arg("--put").arg(format!("{}:/lab/programs/tare", tare.display()));
        command.arg("--put").arg(format!("{}:/lab/bin/tare", with.display()));
    } else {
        command.arg("--put").arg(format!("{}:/lab/bin/tare", tare.display()));
    }
    command.arg("--put").arg(format!("{}:/lab/script", text.display()));
    for (here, there) in files {
        command.arg("--put").arg(format!("{}:{there}", here.display()));
    }
    let output = match command.args(["bash", "/lab/script"]).output() {
        Ok(output) => output,
        Err(error) => panic!("cannot start tare-lab: {error}"),
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace('\r', "");
    let printed = Printed { stdout: text(&output.stdout), stderr: text(&output.stderr) };
    assert!(printed.stdout.ends_with("== over\n"), "the script did not come to its end: {printed:#?}");
    printed
}
